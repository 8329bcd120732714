#pragma once

#include <ATen/core/Tensor.h>

#include "objective/policy_options.h"

namespace heddle::objective {

class SequenceSums;

/// Log-ratios are clamped to +- this before exp.
inline constexpr double kLargestLogRatio = 20;

/// Clamps to +-limit.
at::Tensor clamp(const at::Tensor& x, double limit);

/// k1 = -log rho, k2 = (log rho)^2 / 2 or k3 = rho - log rho - 1 of clamped log-ratios.
at::Tensor k_of(int form, const at::Tensor& log_rho);

/// Weights [n] by options.importance from clamped log-ratios [n]; 1 where it is off. `sequences`
/// may be null unless it is kSequence.
at::Tensor importance_weights(const at::Tensor& log_rho, const PolicyOptions& options,
                              const SequenceSums* sequences);

/// Whether options.rejection leaves each token out, bool [n], by clamped log-ratios [n].
/// `sequence_tokens` [n] as in PolicyTokens; `sequences` may be null for kOff and kToken.
at::Tensor is_rejected(const at::Tensor& log_rho, const at::Tensor& sequence_tokens,
                       const PolicyOptions& options, const SequenceSums* sequences);

}  // namespace heddle::objective
