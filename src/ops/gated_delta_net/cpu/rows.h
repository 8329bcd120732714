#pragma once

#include <ATen/core/Tensor.h>

/// Shared by the CPU kernels of this folder.
namespace heddle::ops::gdn_cpu {

/// x [T,H,D] as it is when the heads of a token are contiguous, else a copy.
at::Tensor head_rows(const at::Tensor& x);

}  // namespace heddle::ops::gdn_cpu
