#include "ops/rotary/rotary.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <cmath>

#include "ops/builtin.h"
#include "ops/operator_support.h"

namespace heddle::ops::testing {
namespace {

KernelTable table(const std::string& name, c10::ScalarType dtype) {
  return table_of(any<QkNormRope>(), name, dtype);
}

at::TensorOptions longs() { return at::TensorOptions(device()).dtype(at::kLong); }

struct Tables {
  at::Tensor cos, sin;
};

Tables tables(std::int64_t tokens, std::int64_t rotary_dim, c10::ScalarType dtype) {
  auto [cos, sin] = rotary_tables(at::arange(tokens, longs()), rotary_dim, 1e4, {}, dtype);
  return {cos, sin};
}

auto run(const KernelTable& kernels, const Tables& t) {
  return [&kernels, t](const Tensors& in) {
    return Tensors{qk_norm_rope(kernels, in[0], in[1], t.cos, t.sin, 1e-6)};
  };
}

TEST(RotaryTables, FollowTheFormula) {
  const at::Tensor positions = at::arange(7, longs()) * 1000;
  auto [cos, sin] = rotary_tables(positions, 8, 1e7, {}, at::kDouble);
  ASSERT_EQ(cos.sizes(), (std::vector<std::int64_t>{7, 4}));
  for (std::int64_t t = 0; t < 7; ++t) {
    for (std::int64_t i = 0; i < 4; ++i) {
      const double angle = 1000.0 * t * std::pow(1e7, -2.0 * i / 8);
      EXPECT_NEAR(cos[t][i].item().toDouble(), std::cos(angle), 1e-9);
      EXPECT_NEAR(sin[t][i].item().toDouble(), std::sin(angle), 1e-9);
    }
  }
  EXPECT_EQ(rotary_tables(positions, 8, 1e7, {}, at::kBFloat16).first.scalar_type(), at::kFloat);
}

TEST(RotaryTables, InterleavesTheAxesOfMultimodalPositions) {
  const at::Tensor t = at::arange(5, longs()), h = t * 10, w = t * 100;
  // Sections 4, 4, 3 of 11: indices 1,4,7,10 take height, 2,5,8 width, the others time.
  auto [cos, sin] = rotary_tables(at::stack({t, h, w}), 22, 1e4, {4, 4, 3}, at::kDouble);
  const std::vector<int> factor = {1, 10, 100, 1, 10, 100, 1, 10, 100, 1, 10};
  for (std::int64_t i = 0; i < 11; ++i) {
    const double angle = 3.0 * factor[static_cast<std::size_t>(i)] * std::pow(1e4, -2.0 * i / 22);
    EXPECT_NEAR(cos[3][i].item().toDouble(), std::cos(angle), 1e-12) << i;
  }
  const auto text = rotary_tables(t, 22, 1e4, {4, 4, 3}, at::kFloat);
  const auto same = rotary_tables(at::stack({t, t, t}), 22, 1e4, {4, 4, 3}, at::kFloat);
  EXPECT_TRUE(identical(text.first, same.first));
  EXPECT_TRUE(identical(text.second, same.second));
  EXPECT_THROW(rotary_tables(at::stack({t, h, w}), 22, 1e4, {4, 4, 4}, at::kFloat), c10::Error);
}

TEST(QkNormRope, GradientsMatchFiniteDifferences) {
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    EXPECT_TRUE(gradients_match(run(kernels, tables(4, 6, at::kDouble)),
                                {randn({4, 3, 11}, at::kDouble, 1), randn({11}, at::kDouble, 2)}))
        << name;
  }
}

/// A plain weight is the zero-centred one plus 1.
TEST(QkNormRope, TakesPlainWeights) {
  const Tables t = tables(5, 8, at::kDouble);
  const at::Tensor x = randn({5, 3, 8}, at::kDouble, 1), weight = randn({8}, at::kDouble, 2);
  for (const std::string name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    const auto plain = [&](const Tensors& in) {
      return Tensors{qk_norm_rope(kernels, in[0], {in[1], 0}, t.cos, t.sin, 1e-6)};
    };
    EXPECT_TRUE(close(plain({x, weight + 1})[0], run(kernels, t)({x, weight})[0], 1e-14)) << name;
    EXPECT_TRUE(gradients_match(plain, {x, weight})) << name;
  }
}

TEST(QkNormRope, KernelEqualsReferenceOnTheViewsOfAProjection) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    const KernelTable kernel = table(kOwn, dtype), reference = table("reference", dtype);
    for (const std::int64_t tokens : {0, 1, 29, 257}) {
      for (const auto& [dim, rotary] : {std::pair{64, 16}, {64, 64}, {33, 10}, {256, 64}}) {
        const Tables t = tables(tokens, rotary, dtype);
        // The q projection holds [query | gate] per head.
        const at::Tensor x = with_poisoned_gaps(randn({tokens, 3, dim}, dtype, 4), dim);
        const at::Tensor w = randn({dim}, dtype, 5);
        const double tolerance = tolerance_of(dtype);
        EXPECT_TRUE(close(run(kernel, t)({x, w})[0], run(reference, t)({x, w})[0], tolerance));
        const Tensors g = gradients_of(run(kernel, t), {x, w});
        const Tensors expected = gradients_of(run(reference, t), {x, w});
        EXPECT_TRUE(close(g[0], expected[0], tolerance));
        EXPECT_TRUE(close(g[1], expected[1], tolerance));
      }
    }
  }
}

TEST(QkNormRope, SameBitsForEveryThreadCount) {
  const KernelTable kernel = table(kOwn, at::kFloat);
  const Tables t = tables(501, 32, at::kFloat);
  const Tensors inputs = {randn({501, 5, 64}, at::kFloat, 1), randn({64}, at::kFloat, 3)};
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const Tensors one = gradients_of(run(kernel, t), inputs);
  at::set_num_threads(2);
  const Tensors two = gradients_of(run(kernel, t), inputs);
  at::set_num_threads(threads);
  EXPECT_TRUE(identical(one[0], two[0]));
  EXPECT_TRUE(identical(one[1], two[1]));
}

}  // namespace
}  // namespace heddle::ops::testing
