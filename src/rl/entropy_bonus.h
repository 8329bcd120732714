#pragma once

#include <algorithm>

#include <nlohmann/json.hpp>

#include "config/run_config.h"

namespace heddle::rl {

/// Coefficient of the entropy that the loss raises: rl.algorithm.entropy_coef, or with an
/// entropy_target one that a step of at most that mean entropy raises by entropy_coef_delta, and
/// any other lowers; the loss has it only after a step of the first kind, and in the first step.
/// From TRL's GRPOTrainer (use_adaptive_entropy).
class EntropyBonus {
 public:
  explicit EntropyBonus(const config::RlAlgorithm& options)
      : options_(options), coefficient_(options.entropy_coef) {}

  /// In the next step's loss.
  double coefficient() const { return is_low_ ? coefficient_ : 0; }
  bool is_on() const { return options_.entropy_coef > 0 || options_.entropy_target > 0; }
  /// After a step of this mean entropy.
  void updated(double entropy) {
    if (options_.entropy_target == 0) return;
    is_low_ = entropy <= options_.entropy_target;
    const double change = is_low_ ? options_.entropy_coef_delta : -options_.entropy_coef_delta;
    coefficient_ =
        std::clamp(coefficient_ + change, options_.entropy_coef_min, options_.entropy_coef_max);
  }

  nlohmann::json state() const { return {{"coefficient", coefficient_}, {"is_low", is_low_}}; }
  /// A fixed coefficient is the configuration's.
  void restore(const nlohmann::json& state) {
    if (options_.entropy_target == 0) return;
    coefficient_ = state.at("coefficient").get<double>();
    is_low_ = state.at("is_low").get<bool>();
  }

 private:
  const config::RlAlgorithm& options_;
  double coefficient_;
  bool is_low_ = true;  ///< The last step's entropy was at most the target.
};

}  // namespace heddle::rl
