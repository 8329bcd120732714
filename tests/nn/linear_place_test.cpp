// Where linear layers stand, as the kernels of their products see it.
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "nn/linear.h"
#include "nn/low_rank.h"
#include "ops/linear/kernels.h"

namespace heddle::nn {
namespace {

using ops::LinearPlace;

std::vector<std::int64_t> seen;  // a product's block, or that of a router less 100

void see(const ops::Products& terms) {
  const LinearPlace& place = terms.at(0).place;
  seen.push_back(place.block - (place.is_router ? 100 : 0));
}

ops::Tensors forward(const std::vector<ops::Products>& sums) {
  see(sums.at(0));
  return ops::linear_reference::forward(sums);
}

at::Tensor backward(const ops::Products& terms) {
  see(terms);
  return ops::linear_reference::backward(terms);
}

ops::KernelTable watching_table() {
  ops::Registry registry;
  ops::KernelInfo info = ops::KernelInfo::reference();
  info.op = "linear";
  registry.add<ops::Linear>(info, {.forward = forward,
                                   .forward_onto = nullptr,
                                   .backward = backward,
                                   .low_rank_backward = ops::linear_reference::low_rank_backward,
                                   .dropped_low = nullptr,
                                   .dropped_gradient = nullptr,
                                   .add_dropped = nullptr});
  return ops::KernelTable::choose(registry, {ops::Platform::kCpu}, at::kFloat,
                                  {ops::OpRequest::of<ops::Linear>()});
}

TEST(LinearPlace, ComesWithTheWeightForwardAndBackward) {
  const ops::KernelTable kernels = watching_table();
  Linear first("first", 4, 4), second("second", 4, 4);
  for (Linear* layer : {&first, &second}) {
    layer->weight().allocate(at::kFloat, at::kCPU);
    layer->weight().data().fill_(0.5);
  }
  LowRank change("first", 4, 4, 1, 2, {}, {});
  for (Parameter* factor : {&change.a(), &change.b()}) {
    factor->allocate(at::kFloat, at::kCPU);
    factor->data().fill_(0.5);
  }
  const at::Tensor x = at::ones({3, 4}).set_requires_grad(true);
  const auto layer = [&](Linear& linear, const at::Tensor& input, const LinearPlace& place,
                         bool is_changed) {
    linear.weight().linear_place() = place;
    if (!is_changed) return linear.forward(kernels, input);
    return changed_linears(kernels, input,
                           std::vector{ChangedLinear{&change, &linear.weight(), {}}})[0];
  };
  for (const bool is_changed : {false, true}) {
    seen.clear();
    const at::Tensor hidden = layer(first, x, {.block = 2}, is_changed);
    layer(second, hidden, {.block = 5, .is_router = true}, is_changed).sum().backward();
    // A change's product with A comes first: it is no layer's.
    const std::vector<std::int64_t> changed = {-1, 2, -1, -95, -95, 2}, plain = {2, -95, -95, 2};
    EXPECT_EQ(seen, is_changed ? changed : plain);
  }
}

}  // namespace
}  // namespace heddle::nn
