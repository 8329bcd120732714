#pragma once

#include <cstdint>
#include <vector>

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

/// The gradient as our kernels read it: contiguous, fp32 or bf16.
inline at::Tensor kernel_gradient(const AdamwTensor& tensor) {
  const at::Tensor gradient = tensor.gradient.contiguous();
  const c10::ScalarType type = gradient.scalar_type();
  return type == at::kFloat || type == at::kBFloat16 ? gradient : gradient.to(at::kFloat);
}

/// Throws c10::Error if the tensors are not on a GPU or do not start on so many bytes.
inline void check_places(const std::vector<at::Tensor>& tensors, std::uintptr_t bytes) {
  for (const at::Tensor& x : tensors) {
    TORCH_CHECK(x.is_cuda(), "cuda.fused: a tensor is on ", x.device());
    TORCH_CHECK(reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % bytes == 0,
                "cuda.fused: a tensor of ", x.sizes(), " does not start on ", bytes, " bytes");
  }
}

}  // namespace heddle::ops::adamw_cuda
