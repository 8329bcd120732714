#include "sync/verification.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include "nn/parameter.h"
#include "weights.h"

namespace heddle::sync {
namespace {

using testing::Weights;

std::vector<TensorHash> hashes(const std::vector<Part>& parts) {
  return sent_hashes(parts, comm::Group("trainers"));
}

TEST(Verification, NamesTheTensorThatDiffers) {
  const Weights weights, others;
  weights.fill(1), others.fill(1);
  EXPECT_EQ(first_difference(hashes(weights.parts()), hashes(others.parts())), "");
  others.c[2][3].select(0, 499).fill_(1.5);
  const std::string difference = first_difference(hashes(weights.parts()), hashes(others.parts()));
  EXPECT_TRUE(difference.starts_with("c has hash ")) << difference;
  std::vector<Part> fewer = weights.parts();
  fewer.pop_back();
  EXPECT_EQ(first_difference(hashes(weights.parts()), hashes(fewer)), "one side alone has c");
}

TEST(Verification, SeesValuesThatChangedPlaces) {
  const at::Tensor a = at::arange(12, at::kFloat).view({3, 4}), b = a.clone();
  b[1].copy_(a[2]), b[2].copy_(a[1]);
  const auto hash = [](const at::Tensor& t) {
    return hashes({{{"t", {3, 4}, at::kFloat}, {{whole_region({3, 4}), t}}}})[0].hash;
  };
  EXPECT_NE(hash(a), hash(b));
  EXPECT_NE(hash(a), 0u);
}

TEST(Verification, IsTheSameForEveryCutAndEveryDtype) {
  for (const c10::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    nn::Parameter parameter("p", {6, 5});
    parameter.allocate(dtype, at::kCPU);
    const at::Tensor data = parameter.data();
    data.copy_((at::arange(30, at::kFloat) * 0.37 - 4).view({6, 5}));
    const TensorInfo info{"p", {6, 5}, dtype};
    const auto part = [&](std::int64_t row, std::int64_t rows, std::int64_t column,
                          std::int64_t columns) {
      return nn::Box{{{row, column}, {rows, columns}},
                     data.narrow(0, row, rows).narrow(1, column, columns)};
    };
    const auto whole = hashes({{info, {part(0, 6, 0, 5)}}});
    const auto cut = hashes({{info, {part(0, 2, 0, 3), part(0, 2, 3, 2), part(2, 4, 0, 5)}}});
    EXPECT_EQ(first_difference(whole, cut), "") << c10::toString(dtype);
    const auto held =
        held_hashes([&](const std::function<void(nn::Parameter&)>& visit) { visit(parameter); },
                    comm::Group("one"));
    EXPECT_EQ(first_difference(whole, held), "") << c10::toString(dtype);
  }
}

}  // namespace
}  // namespace heddle::sync
