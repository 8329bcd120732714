#pragma once

#include "ops/optimizer_step/cuda/adamw_scalars.h"
#include "ops/optimizer_step/optimizer_step.h"

namespace heddle::ops::adamw_cuda {

inline cuda::AdamwScalars scalars_of(const AdamwOptions& options) {
  static_assert(sizeof(AdamwNow) == 5 * sizeof(double));
  const at::Tensor& given = options.on_device;
  TORCH_CHECK(!given.defined() || (given.is_cuda() && given.is_contiguous() && given.numel() == 5),
              "adamw_step: the numbers on the device must be fp64 [5]");
  return {static_cast<float>(options.beta1), static_cast<float>(options.beta2),
          static_cast<float>(options.eps),
          adamw_now(options.lr, options.beta1, options.beta2, options.step,
                    options.gradient_multiplier),
          given.defined() ? reinterpret_cast<const AdamwNow*>(given.const_data_ptr<double>())
                          : nullptr};
}

}  // namespace heddle::ops::adamw_cuda
