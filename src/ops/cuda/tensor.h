#pragma once

#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "ops/cuda/element.h"
#include "ops/registry.h"

/// Between ATen's tensors and the raw pointers of the CUDA kernels.
namespace heddle::ops::cuda {

/// Makes the tensor's device current for its life; work goes to that device's current stream.
/// TORCH_CHECKs that the tensor is on a CUDA device.
class OnDevice {
 public:
  explicit OnDevice(const at::Tensor& tensor);
  cudaStream_t stream() const { return stream_; }

 private:
  c10::DeviceGuard guard_;
  cudaStream_t stream_;
};

/// TORCH_CHECKs that the tensor holds fp32 or bf16.
Element element_of(const at::Tensor& tensor);

/// The tensor, or a copy in which the last dimension is contiguous.
at::Tensor with_unit_stride(const at::Tensor& tensor);

/// Whether it is bf16 with rows that copies of 16 bytes can read.
bool has_rows_of_16_bytes(const at::Tensor& matrix);

/// The rows of a [rows, width] or [outer, inner, width] tensor with unit stride over the width; no
/// rows for an undefined one.
InputRows input_rows(const at::Tensor& tensor);
OutputRows output_rows(const at::Tensor& tensor);

/// Uninitialised fp32 scratch on the tensor's device.
at::Tensor workspace_on(const at::Tensor& tensor, std::int64_t floats);

}  // namespace heddle::ops::cuda
