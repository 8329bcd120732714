#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tenants/trainer.h"

namespace heddle::tenants {

/// Inputs and numbers of one loss of the API.
struct LossKind {
  struct Input {
    const char* name;
    bool required;
  };
  /// Thresholds of ratios, where nobody gives others.
  struct Clips {
    double low, high;
    bool around_one;  ///< Ratios of 1, of tokens whose policy has not changed, lie between them.
  };
  const char* name;
  std::vector<Input> inputs;   ///< Besides target_tokens.
  std::vector<Input> numbers;  ///< Numbers of its configuration.
  std::optional<Clips> clips;  ///< Numbers too, and inputs unless it is a loss of sequences.
  bool takes_soft_targets = false;
};

inline constexpr const char* kClipLow = "clip_low_threshold";
inline constexpr const char* kClipHigh = "clip_high_threshold";

/// Throws DataError for an unknown loss.
const LossKind& loss_kind(const std::string& name);

/// Throws DataError for an unknown loss, a number of its configuration that it does not have or
/// that is out of range, and for a datum whose inputs are not the loss's, not as long as its tokens
/// or out of range.
void check_loss(const Work& work);

}  // namespace heddle::tenants
