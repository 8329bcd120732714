#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "ops/builtin.h"
#include "ops/gated_delta_net/gated_delta_net.h"
#include "ops/operator_support.h"

namespace heddle::ops {
namespace {

using testing::any;
using testing::close;
using testing::gradients_match;
using testing::gradients_of;
using testing::identical;
using testing::randn;

KernelTable gates_table(c10::ScalarType dtype) {
  return testing::table_of(any<GdnGates>(), "reference", dtype);
}
KernelTable norm_table(const std::string& name, c10::ScalarType dtype) {
  return testing::table_of(any<GatedRmsNorm>(), name, dtype);
}

TEST(GdnGates, EqualsTheFormula) {
  const at::Tensor a = randn({50, 3}, at::kDouble, 1) * 20, b = randn({50, 3}, at::kDouble, 2);
  const at::Tensor a_log = randn({3}, at::kDouble, 3), bias = randn({3}, at::kDouble, 4);
  const auto [g, beta] = gdn_gates(gates_table(at::kDouble), a, b, a_log, bias);
  for (int t = 0; t < 50; ++t) {
    for (int h = 0; h < 3; ++h) {
      const double x = a[t][h].item().toDouble() + bias[h].item().toDouble();
      const double softplus = x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
      EXPECT_NEAR(g[t][h].item().toDouble(), -std::exp(a_log[h].item().toDouble()) * softplus,
                  1e-12 * (1 + softplus));
      EXPECT_NEAR(beta[t][h].item().toDouble(), 1 / (1 + std::exp(-b[t][h].item().toDouble())),
                  1e-14);
    }
  }
}

TEST(GdnGates, GradientsMatchFiniteDifferences) {
  const Tensors inputs{randn({7, 3}, at::kDouble, 1), randn({7, 3}, at::kDouble, 2),
                       randn({3}, at::kDouble, 3), randn({3}, at::kDouble, 4)};
  const KernelTable kernels = gates_table(at::kDouble);
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& x) -> Tensors {
        const auto [g, beta] = gdn_gates(kernels, x[0], x[1], x[2], x[3]);
        return {g, beta};
      },
      inputs));
}

TEST(GdnGates, NarrowInputsGiveFloatGates) {
  const at::Tensor a = randn({5, 2}, at::kBFloat16, 1), one = randn({2}, at::kFloat, 3);
  const auto [g, beta] = gdn_gates(gates_table(at::kBFloat16), a, a, one, one);
  EXPECT_EQ(g.scalar_type(), at::kFloat);
  EXPECT_EQ(beta.scalar_type(), at::kFloat);
  const auto [exact, exact_beta] =
      gdn_gates(gates_table(at::kDouble), a.to(at::kDouble), a.to(at::kDouble), one.to(at::kDouble),
                one.to(at::kDouble));
  EXPECT_TRUE(close(g, exact, 1e-6));
  EXPECT_TRUE(close(beta, exact_beta, 1e-6));
}

TEST(GatedRmsNorm, GradientsMatchFiniteDifferences) {
  for (const std::string name : {"reference", testing::kOwn}) {
    const Tensors inputs{randn({3, 2, 16}, at::kDouble, 1), randn({3, 2, 16}, at::kDouble, 2),
                         randn({16}, at::kDouble, 3)};
    const KernelTable kernels = norm_table(name, at::kDouble);
    EXPECT_TRUE(gradients_match(
        [&](const Tensors& x) -> Tensors {
          return {gated_rms_norm(kernels, x[0], x[1], x[2], 1e-6)};
        },
        inputs))
        << name;
  }
}

TEST(GatedRmsNorm, KernelEqualsReference) {
  for (const auto dtype : testing::kernel_dtypes()) {
    for (const auto& [T, H, V] : std::vector<std::array<std::int64_t, 3>>{
             {0, 2, 16}, {1, 1, 16}, {29, 3, 48}, {129, 8, 64}, {65, 5, 128}}) {
      const Tensors inputs{randn({T, H, V}, dtype, 1) * 3, randn({T, H, V}, dtype, 2) * 4,
                           randn({V}, dtype, 3)};
      // Columns of a wider projection: a token stride, and NaN between.
      Tensors strided = inputs;
      strided[1] = testing::with_poisoned_gaps(inputs[1].flatten(1)).unflatten(1, {H, V});
      Tensors wide;
      for (const at::Tensor& x : inputs) wide.push_back(x.to(at::kDouble));
      const auto through = [](const KernelTable& kernels) {
        return [kernels](const Tensors& x) -> Tensors {
          return {gated_rms_norm(kernels, x[0], x[1], x[2], 1e-6)};
        };
      };
      const auto kernel = through(norm_table(testing::kOwn, dtype));
      const auto reference = through(norm_table("reference", at::kDouble));
      EXPECT_TRUE(close(kernel(strided)[0], reference(wide)[0], testing::tolerance_of(dtype)));
      const Tensors found = gradients_of(kernel, strided), expected = gradients_of(reference, wide);
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(close(found[i], expected[i], testing::tolerance_of(dtype)))
            << "gradient " << i << " of " << T << "x" << H << "x" << V << " in "
            << c10::toString(dtype);
      }
      const Tensors again = gradients_of(kernel, strided);
      for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(identical(again[i], found[i]));
    }
  }
}

TEST(GatedRmsNorm, RefusesOddHeadDims) {
  for (const auto& [dim, kernel] : {std::pair{15, "reference"}, {64, "cpu.vector"}}) {
    const KernelTable chosen = KernelTable::choose(builtin_registry(), {}, at::kFloat,
                                                   {OpRequest::of<GatedRmsNorm>({.dim = dim})});
    EXPECT_EQ(chosen.choices()[0].kernel, kernel);
  }
  const at::Tensor x = randn({3, 2, 15}, at::kFloat, 1);
  EXPECT_THROW(
      gated_rms_norm(norm_table("cpu.vector", at::kFloat), x, x, randn({15}, at::kFloat, 2), 1e-6),
      c10::Error);
  EXPECT_NO_THROW(
      gated_rms_norm(norm_table("reference", at::kFloat), x, x, randn({15}, at::kFloat, 2), 1e-6));
}

}  // namespace
}  // namespace heddle::ops
