// The numbers of a step in a kernel of AdamW.
#pragma once

#include <cstdint>

#include "ops/optimizer_step/cuda/adamw_scalars.h"

namespace heddle::ops::cuda {

struct AdamwFloats {
  float beta1, beta2, eps, step_size, inverse_root_correction2, gradient_multiplier;
  double lr;
  unsigned long long step;
  bool changes_nothing;

  __device__ __forceinline__ explicit AdamwFloats(const AdamwScalars& s) {
    const AdamwNow now = s.on_device != nullptr ? *s.on_device : s.now;
    beta1 = s.beta1, beta2 = s.beta2, eps = s.eps;
    step_size = static_cast<float>(now.step_size);
    inverse_root_correction2 = static_cast<float>(now.inverse_root_correction2);
    gradient_multiplier = static_cast<float>(now.gradient_multiplier);
    lr = now.lr;
    step = static_cast<unsigned long long>(now.step);
    changes_nothing = isnan(now.gradient_multiplier);
  }
  /// 1 - lr * weight decay, rounded as on the host.
  __device__ __forceinline__ float decay(double weight_decay) const {
    return static_cast<float>(__dsub_rn(1.0, __dmul_rn(lr, weight_decay)));
  }
};

/// Whether vectors may be read there; null counts as such a place.
template <class... P>
__device__ __forceinline__ bool start_on_16_bytes(const P*... places) {
  return ((reinterpret_cast<std::uintptr_t>(places) | ...) & 15) == 0;
}

}  // namespace heddle::ops::cuda
