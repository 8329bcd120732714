#include "nn/fill.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "comm/mesh.h"

namespace heddle::nn {
namespace {

using comm::Dim;

/// A value that no two elements share.
double value_of(std::uint64_t i) { return static_cast<double>(i) + 0.25; }

/// The part of the whole that each rank of a mesh has, of a parameter of this shape and placement,
/// is filled as the whole is, with as many values as the rank owns.
void check(const std::vector<std::int64_t>& shape, const Placement& placement,
           const comm::Mesh::Sizes& sizes, std::int64_t ranks, std::int64_t ep = 1) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) numel *= size;
  const at::Tensor whole = at::arange(numel, at::kDouble).add(0.25).view(shape);
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    Parameter parameter("parameter", shape, placement), expected("parameter", shape, placement);
    for (Parameter* p : {&parameter, &expected}) {
      p->place(comm::Mesh(sizes, rank, ranks, ep));
      p->allocate(at::kDouble, c10::kCPU);
    }
    // Of the rows that the placement leaves, sharding leaves some.
    const std::int64_t first = parameter.local_shape()[0] / 3;
    std::vector<std::int64_t> owned = parameter.local_shape();
    owned[0] -= first;
    for (Parameter* p : {&parameter, &expected}) p->set_owned(at::zeros(owned, at::kDouble), first);
    std::atomic<std::int64_t> asked = 0;
    fill_owned(parameter, [&](std::uint64_t i) {
      ++asked;
      return value_of(i);
    });
    expected.write_owned(whole);
    EXPECT_TRUE(at::equal(parameter.owned(), expected.owned())) << "rank " << rank;
    EXPECT_EQ(asked, parameter.owned().numel());
  }
}

TEST(Fill, EveryLayoutHasTheValuesOfTheWhole) {
  check({29}, {}, {1, 1, 1, 1, 1}, 1);
  check({29, 7}, {}, {1, 1, 1, 1, 1}, 1);
  check({24, 7}, {{Dim::kTp, 0, {16, 8}}}, {4, 1, 1, 1, 1}, 4);
  check({5, 24}, {{Dim::kTp, 1, {8, 8, 8}}}, {4, 1, 1, 1, 1}, 4);
  // Two parts on four ranks.
  check({5, 24}, {{Dim::kTp, 1, {}, 2}}, {4, 1, 1, 1, 1}, 4);
  check({8, 6, 10}, {{Dim::kEp, 0, {}}}, {2, 1, 1, 1, 1}, 2, 2);
  // More elements than one piece of work has.
  check({300, 521}, {{Dim::kTp, 0, {}}}, {2, 1, 1, 1, 1}, 2);
}

TEST(Fill, ARankWithoutAPartAsksForNothing) {
  Parameter parameter("parameter", {3, 4});
  parameter.allocate_elsewhere(at::kFloat, c10::kCPU);
  fill_owned(parameter, [](std::uint64_t) -> double { throw std::logic_error("asked"); });
}

}  // namespace
}  // namespace heddle::nn
