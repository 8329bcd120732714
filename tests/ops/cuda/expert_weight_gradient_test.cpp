// Gradients of experts' matrices by wgmma against products in fp64, expert by expert.
#include "ops/moe/cuda/grouped_weight_gradient.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ops/cuda/fused_support.h"
#include "ops/cuda/tensor.h"
#include "ops/moe/cuda/grouped_product.h"

namespace heddle::ops::testing {
namespace {

class GpuExpertWeightGradient : public GpuFused {
 protected:
  void SetUp() override {
    GpuFused::SetUp();
    if (!IsSkipped() && !cuda::grouped_product_available()) GTEST_SKIP() << "no sm_90a";
  }
};

/// Around the steps of 16 rows and the stages of 64 that the kernel takes, and none.
const std::vector<int> kRagged = {0,  1,  15, 16, 17,  0, 63, 64, 65,  129,
                                  47, 48, 49, 0,  300, 1, 31, 33, 577, 0};

/// dy and x on the device; `dw` begins as NaN.
at::Tensor weight_gradients(const at::Tensor& dy, const at::Tensor& x,
                            const std::vector<int>& ends) {
  const auto experts = static_cast<std::int64_t>(ends.size());
  const at::Tensor on_device = at::tensor(ends, at::kInt).to(x.device());
  at::Tensor dw = at::full({experts, dy.size(1), x.size(1)},
                           std::numeric_limits<double>::quiet_NaN(), x.options());
  const cuda::OnDevice on(x);
  cuda::grouped_weight_gradient(
      {dy.const_data_ptr(), x.const_data_ptr(), dw.mutable_data_ptr(),
       on_device.const_data_ptr<std::int32_t>(), dy.size(0), dy.size(1), x.size(1), experts},
      on.stream());
  return dw;
}

void expect_equal_reference(const std::vector<int>& rows, std::int64_t beyond, std::int64_t out,
                            std::int64_t in) {
  SCOPED_TRACE(::testing::Message() << out << " x " << in << ", " << beyond << " rows beyond");
  std::vector<int> ends;
  for (const int count : rows) ends.push_back(count + (ends.empty() ? 0 : ends.back()));
  const auto with_rows_beyond = [&](std::int64_t width, std::uint64_t seed) {
    at::Tensor all = randn({ends.back() + beyond, width}, at::kBFloat16, seed);
    all.narrow(0, ends.back(), beyond).fill_(std::numeric_limits<double>::quiet_NaN());
    return all;
  };
  const at::Tensor dy = with_rows_beyond(out, 1), x = with_rows_beyond(in, 2);
  const at::Tensor there = dy.to(gpu()), x_there = x.to(gpu()),
                   actual = weight_gradients(there, x_there, ends).cpu();
  EXPECT_TRUE(identical(actual, weight_gradients(there, x_there, ends).cpu()));
  for (std::size_t e = 0; e < rows.size(); ++e) {
    const auto part = [&](const at::Tensor& all) {
      return all.narrow(0, ends[e] - rows[e], rows[e]).to(at::kDouble);
    };
    const at::Tensor expected = part(dy).t().matmul(part(x));
    const at::Tensor own = actual[static_cast<std::int64_t>(e)];
    EXPECT_TRUE(rows[e] == 0 ? identical(own, at::zeros_like(own)) : close(own, expected, 5e-3))
        << "expert " << e << " with " << rows[e] << " rows";
  }
}

TEST_F(GpuExpertWeightGradient, EqualsReferenceOnRaggedExperts) {
  // One tile in part, tiles at the edges of the matrix, and several.
  for (const auto& [out, in] :
       {std::pair{64, 64}, {128, 256}, {192, 320}, {320, 192}, {512, 128}, {256, 512}}) {
    for (const std::int64_t beyond : {0, 37}) expect_equal_reference(kRagged, beyond, out, in);
  }
}

TEST_F(GpuExpertWeightGradient, EqualsReferenceOnOneExpert) {
  expect_equal_reference({1}, 0, 64, 64);
  expect_equal_reference({2000}, 0, 256, 256);
}

TEST_F(GpuExpertWeightGradient, EqualsReferenceOnMostExperts) {
  std::vector<int> most(cuda::kMostExperts);
  for (std::size_t e = 0; e < most.size(); ++e) most[e] = static_cast<int>(e * 37 % 23);
  most[5] = 500;  // taken first
  expect_equal_reference(most, 21, 64, 128);
  expect_equal_reference(most, 0, 192, 704);
}

TEST_F(GpuExpertWeightGradient, IsZeroWithoutRows) {
  for (const std::int64_t beyond : {0, 5}) expect_equal_reference({0, 0, 0}, beyond, 128, 128);
}

TEST_F(GpuExpertWeightGradient, RefusesOtherSizes) {
  const auto gradients = [](std::int64_t out, std::int64_t in, std::size_t experts) {
    const at::Tensor dy = at::zeros({8, out}, at::kBFloat16).to(gpu()),
                     x = at::zeros({8, in}, at::kBFloat16).to(gpu());
    return weight_gradients(dy, x, std::vector<int>(experts, 0));
  };
  EXPECT_THROW(gradients(96, 64, 2), std::invalid_argument);
  EXPECT_THROW(gradients(64, 72, 2), std::invalid_argument);
  EXPECT_THROW(gradients(64, 64, cuda::kMostExperts + 1), std::invalid_argument);
}

}  // namespace
}  // namespace heddle::ops::testing
