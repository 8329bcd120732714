#include "objective/contrastive.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/rng.h"

namespace heddle::objective {
namespace {

/// Three queries with one, two and no negatives.
const std::vector<std::int64_t> kTexts = {0, 1, 2, 0, 1, 2, 3, 0, 1};

at::Tensor random_rows(std::int64_t rows, std::int64_t width) {
  const CounterRng rng(5, "contrastive");
  at::Tensor result = at::zeros({rows, width}, at::kDouble);
  double* out = result.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < result.numel(); ++i) out[i] = 2 * rng.uniform(i) - 1;
  return result;
}

/// The formula, number by number.
double loss_of(const at::Tensor& rows, double temperature, bool normalize) {
  const auto dot = [&](std::size_t a, std::size_t b) {
    double product = 0, aa = 0, bb = 0;
    for (std::int64_t h = 0; h < rows.size(1); ++h) {
      const double x = rows[a][h].item<double>(), y = rows[b][h].item<double>();
      product += x * y, aa += x * x, bb += y * y;
    }
    return (normalize ? product / std::sqrt(aa * bb) : product) / temperature;
  };
  double loss = 0;
  for (std::size_t q = 0; q < kTexts.size(); ++q) {
    if (kTexts[q] != 0) continue;
    double sum = 0;
    for (std::size_t d = 0; d < kTexts.size(); ++d) {
      if (kTexts[d] != 0) sum += std::exp(dot(q, d));
    }
    loss += std::log(sum) - dot(q, q + 1);
  }
  return loss;
}

TEST(InfoNce, EqualsTheFormulaAndItsSlope) {
  for (const bool normalize : {true, false}) {
    const double temperature = normalize ? 0.2 : 1.5, scale = 0.25, step = 1e-6;
    const at::Tensor rows = random_rows(9, 5);
    const auto result = info_nce(rows, kTexts, {temperature, normalize}, scale, true);
    EXPECT_NEAR(result.loss_sum.item<double>(), loss_of(rows, temperature, normalize), 1e-10);
    for (std::int64_t i = 0; i < 9; ++i) {
      for (std::int64_t h = 0; h < 5; ++h) {
        at::Tensor more = rows.clone(), less = rows.clone();
        more[i][h] += step, less[i][h] -= step;
        const double slope =
            (loss_of(more, temperature, normalize) - loss_of(less, temperature, normalize)) /
            (2 * step);
        EXPECT_NEAR(result.gradient[i][h].item<double>(), scale * slope, 1e-7);
      }
    }
    EXPECT_FALSE(rows.requires_grad());
    EXPECT_FALSE(info_nce(rows, kTexts, {temperature, normalize}, 1, false).gradient.defined());
  }
}

TEST(Retrieval, RanksTheOwnPositive) {
  // Texts lie on axes; query 0 points at its positive, query 1 at a negative of query 0.
  at::Tensor rows = at::zeros({5, 3}, at::kDouble);
  const std::vector<std::int64_t> texts = {0, 1, 2, 0, 1};
  rows[0][0] = 2, rows[1][0] = 1, rows[2][1] = 1, rows[3][1] = 5, rows[3][2] = 1, rows[4][2] = 1;
  const auto found = retrieval(rows, texts, true);
  EXPECT_DOUBLE_EQ(found.accuracy_at_1, 0.5);
  EXPECT_DOUBLE_EQ(found.mrr_at_10, 0.75);
}

}  // namespace
}  // namespace heddle::objective
