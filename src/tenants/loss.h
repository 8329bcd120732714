#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tenants/loss_kinds.h"

namespace heddle::tenants {

/// A loss's value and derivative on the sequences of one piece, laid end to end.
struct LossValues {
  double sum = 0;
  std::vector<double> elementwise;  ///< [R]; empty where the loss is no sum over tokens.
  std::vector<double> d_logprobs;   ///< [R]
};

/// On log-probabilities [R] of the target tokens of `data`, of work that check_loss() takes.
LossValues loss_of(const Work& work, std::span<const Datum> data, std::span<const double> logprobs);

/// LossValues::d_logprobs where the log-probabilities do not change it; none for other losses.
std::optional<std::vector<double>> constant_derivatives(const Work& work,
                                                        std::span<const Datum> data);

}  // namespace heddle::tenants
