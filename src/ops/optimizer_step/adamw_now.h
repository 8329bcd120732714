#pragma once

#include <cmath>
#include <cstdint>

/// Numbers of AdamW that change from step to step. Plain C++: CUDA sources read them on the device.
namespace heddle::ops {

struct AdamwNow {
  double lr = 0;
  double step_size = 0;                 ///< lr / (1 - beta1^step)
  double inverse_root_correction2 = 1;  ///< (1 - beta2^step)^-1/2
  double gradient_multiplier = 1;       ///< NaN: the step changes nothing.
  double step = 1;                      ///< From 1.
};

inline AdamwNow adamw_now(double lr, double beta1, double beta2, std::int64_t step,
                          double gradient_multiplier) {
  const auto steps = static_cast<double>(step);
  return {lr, lr / (1 - std::pow(beta1, steps)), 1 / std::sqrt(1 - std::pow(beta2, steps)),
          gradient_multiplier, steps};
}

}  // namespace heddle::ops
