#include "ops/rms_norm/rms_norm.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include "ops/builtin.h"
#include "ops/operator_support.h"

namespace heddle::ops::testing {
namespace {

KernelTable table(const std::string& name, c10::ScalarType dtype) {
  return table_of(any<RmsNorm>(), name, dtype);
}

Tensors both(const KernelTable& kernels, const Tensors& in) {
  auto [y, sum] = add_rms_norm(kernels, in[0], in[1], in[2], 1e-6);
  return {y, sum};
}

class RmsNormKernel : public ::testing::TestWithParam<std::string> {};

TEST_P(RmsNormKernel, GradientsMatchFiniteDifferences) {
  const KernelTable kernels = table(GetParam(), at::kDouble);
  const Tensors inputs = {randn({5, 7}, at::kDouble, 1), randn({5, 7}, at::kDouble, 2),
                          randn({7}, at::kDouble, 3)};
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& in) { return Tensors{rms_norm(kernels, in[0], in[1], 1e-6)}; },
      {inputs[0], inputs[2]}));
  EXPECT_TRUE(gradients_match([&](const Tensors& in) { return both(kernels, in); }, inputs));
}

/// A plain weight is the zero-centred one plus 1.
TEST_P(RmsNormKernel, TakesPlainWeights) {
  const KernelTable kernels = table(GetParam(), at::kDouble);
  const Tensors inputs = {randn({5, 7}, at::kDouble, 1), randn({7}, at::kDouble, 3)};
  const auto plain = [&](const Tensors& in) {
    return Tensors{rms_norm(kernels, in[0], {in[1], 0}, 1e-6)};
  };
  EXPECT_TRUE(close(plain({inputs[0], inputs[1] + 1})[0],
                    rms_norm(kernels, inputs[0], inputs[1], 1e-6), 1e-14));
  EXPECT_TRUE(gradients_match(plain, inputs));
}

INSTANTIATE_TEST_SUITE_P(, RmsNormKernel, ::testing::Values("reference", kOwn),
                         heddle::testing::ParameterName());

TEST(RmsNorm, KernelEqualsReference) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    const KernelTable kernel = table(kOwn, dtype), reference = table("reference", dtype);
    for (const std::int64_t rows : {0, 1, 3, 129, 1000}) {
      for (const std::int64_t width : {3, 15, 64, 257}) {
        SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(width) + " " +
                     c10::toString(dtype));
        const Tensors inputs = {randn({rows, width}, dtype, 1), randn({rows, width}, dtype, 2),
                                randn({width}, dtype, 3)};
        const auto run = [&](const KernelTable& t) {
          return [&](const Tensors& in) { return both(t, in); };
        };
        const Tensors y = run(kernel)(inputs), expected = run(reference)(inputs);
        const double tolerance = tolerance_of(dtype);
        EXPECT_TRUE(close(y[0], expected[0], tolerance));
        EXPECT_TRUE(identical(y[1], expected[1]));
        const Tensors g = gradients_of(run(kernel), inputs),
                      g_expected = gradients_of(run(reference), inputs);
        for (std::size_t i = 0; i < g.size(); ++i) {
          EXPECT_TRUE(close(g[i], g_expected[i], tolerance)) << i;
        }
      }
    }
  }
}

TEST(RmsNorm, ReadsOnlyItsViewAndKeepsTheShape) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    const KernelTable kernel = table(kOwn, dtype);
    const at::Tensor x = randn({3, 4, 33}, dtype, 5), w = randn({33}, dtype, 6);
    const at::Tensor y = rms_norm(kernel, with_poisoned_gaps(x), w, 1e-6);
    EXPECT_TRUE(identical(y, rms_norm(kernel, x, w, 1e-6)));
    EXPECT_EQ(y.sizes(), x.sizes());
  }
}

TEST(RmsNorm, OnlyTheResidualStreamFlowsBack) {
  const KernelTable kernel = table(kOwn, at::kFloat);
  const Tensors inputs = {randn({4, 8}, at::kFloat, 1), randn({4, 8}, at::kFloat, 2),
                          randn({8}, at::kFloat, 3)};
  const Tensors g = gradients_of(
      [&](const Tensors& in) {
        return Tensors{add_rms_norm(kernel, in[0], in[1], in[2], 1e-6).second};
      },
      inputs);
  EXPECT_TRUE(identical(g[0], g[1]));
  EXPECT_FALSE(g[2].defined());
}

// The residual stream as a second output: the norm and the identity of the same input.
TEST(RmsNorm, BranchAddsTheGradientOfTheStream) {
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    const Tensors inputs = {randn({5, 7}, at::kDouble, 1), randn({7}, at::kDouble, 3)};
    const auto branch = [&](const Tensors& in) {
      auto [y, x] = rms_norm_branch(kernels, in[0], in[1], 1e-6);
      return Tensors{y, x};
    };
    EXPECT_TRUE(identical(branch(inputs)[1], inputs[0]));
    EXPECT_TRUE(gradients_match(branch, inputs)) << name;
  }
}

// Two readers of the output, whose gradients are added within.
TEST(RmsNorm, BranchesAddTheGradientsOfTwoReaders) {
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    const Tensors inputs = {randn({5, 7}, at::kDouble, 1), randn({7}, at::kDouble, 3)};
    const auto all = [&](const Tensors& in) {
      const NormBranches branches = rms_norm_branches(kernels, in[0], in[1], 1e-6);
      return Tensors{branches.y, branches.y_2 * 3, branches.stream};
    };
    EXPECT_TRUE(identical(all(inputs)[1], all(inputs)[0] * 3));
    EXPECT_TRUE(gradients_match(all, inputs)) << name;
    const auto second = [&](const Tensors& in) {
      return Tensors{rms_norm_branches(kernels, in[0], in[1], 1e-6).y_2};
    };
    EXPECT_TRUE(gradients_match(second, inputs)) << name;
  }
}

TEST(RmsNorm, MakesItsOutputAgainInTheBackward) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    for (const char* name : {"reference", kOwn}) {
      const KernelTable kernel = table(name, dtype);
      const Tensors inputs = {randn({29, 72}, dtype, 1), randn({72}, dtype, 2)};
      at::Tensor again;
      const auto branch = [&](const OutputAgain& take) {
        return [&kernel, take](const Tensors& in) {
          auto [y, x] = rms_norm_branch(kernel, in[0], in[1], 1e-6, take);
          return Tensors{y, x};
        };
      };
      const Tensors g = gradients_of(branch([&](const at::Tensor& y) { again = y; }), inputs);
      const Tensors expected = gradients_of(branch({}), inputs);
      EXPECT_TRUE(identical(again, rms_norm(kernel, inputs[0], inputs[1], 1e-6)));
      EXPECT_TRUE(identical(g[0], expected[0]) && identical(g[1], expected[1]));
    }
  }
}

TEST(RmsNorm, SameBitsForEveryThreadCount) {
  const KernelTable kernel = table(kOwn, at::kFloat);
  const Tensors inputs = {randn({777, 96}, at::kFloat, 1), randn({777, 96}, at::kFloat, 2),
                          randn({96}, at::kFloat, 3)};
  const auto f = [&](const Tensors& in) { return both(kernel, in); };
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const Tensors one = gradients_of(f, inputs);
  at::set_num_threads(2);
  const Tensors two = gradients_of(f, inputs);
  at::set_num_threads(threads);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(identical(one[i], two[i])) << i;
}

TEST(RmsNorm, RefusesAWeightOfAnotherWidth) {
  const KernelTable kernel = table(kOwn, at::kFloat);
  EXPECT_THROW(rms_norm(kernel, randn({4, 8}, at::kFloat, 1), randn({7}, at::kFloat, 1), 1e-6),
               c10::Error);
}

}  // namespace
}  // namespace heddle::ops::testing
