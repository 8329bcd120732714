#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace heddle::ops::testing {

/// Entropies of rows whose logits are alike, or of which one or two tower over the rest; every
/// logit is exact in every dtype.
inline void expect_entropies_of_extreme_logits(const KernelTable& kernels, c10::ScalarType dtype,
                                               c10::Device on, std::int64_t vocabulary) {
  struct Row {
    std::int64_t feature;  ///< 0 raises all logits, 1 the first, 2 two of them.
    double value, entropy;
  };
  const auto count = static_cast<double>(vocabulary);
  const double uniform = std::log(count), e = std::exp(1.0), sum = count - 1 + e;
  const std::vector<Row> rows = {{0, 0, uniform},
                                 {0, 128, uniform},
                                 {1, 1000, 0},
                                 {1, 29952, 0},
                                 {2, 1000, std::log(2.0)},
                                 {1, -1000, std::log(count - 1)},
                                 {1, 1, std::log(sum) - e / sum}};
  const auto number = static_cast<std::int64_t>(rows.size());
  const at::Tensor weight = at::zeros({vocabulary, 3}), hidden = at::zeros({number, 3});
  weight.select(1, 0).fill_(1);
  weight[0][1].fill_(1);
  weight[vocabulary / 100][2].fill_(1);
  weight[vocabulary - 1][2].fill_(1);
  for (std::int64_t i = 0; i < number; ++i) hidden[i][rows[i].feature].fill_(rows[i].value);
  LinearCrossEntropy::Inputs in;
  in.hidden = hidden.to(on, dtype);
  in.weight = weight.to(on, dtype);
  in.labels = at::zeros({number}, at::TensorOptions().dtype(at::kLong)).to(on);
  in.want_entropy = true;
  const at::Tensor found =
      linear_cross_entropy(kernels, in, false, false).entropy.cpu().to(at::kDouble);
  for (std::int64_t i = 0; i < number; ++i) {
    const double entropy = found[i].item<double>(), expected = rows[i].entropy;
    const double tolerance = dtype == at::kDouble ? 1e-12 : expected == 0 ? 1e-6 : 2e-5;
    EXPECT_NEAR(entropy, expected, tolerance) << "row " << i;
    EXPECT_GE(entropy, 0) << "row " << i;
  }
}

}  // namespace heddle::ops::testing
