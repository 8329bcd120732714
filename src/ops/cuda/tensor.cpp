#include "ops/cuda/tensor.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>

namespace heddle::ops::cuda {

OnDevice::OnDevice(const at::Tensor& tensor) : guard_(tensor.device()), stream_(nullptr) {
  TORCH_CHECK(tensor.is_cuda(), "a CUDA kernel was given a tensor on ", tensor.device());
  stream_ = c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
}

Element element_of(const at::Tensor& tensor) {
  const c10::ScalarType type = tensor.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16,
              "the CUDA kernels take float32 and bfloat16, not ", type);
  return type == at::kFloat ? Element::kFloat32 : Element::kBFloat16;
}

at::Tensor with_unit_stride(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor
                                                                             : tensor.contiguous();
}

bool has_rows_of_16_bytes(const at::Tensor& matrix) {
  return matrix.scalar_type() == at::kBFloat16 && matrix.size(1) > 0 && matrix.stride(1) == 1 &&
         matrix.stride(0) % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(matrix.const_data_ptr()) % 16 == 0;
}

namespace {

template <class Pointer>
Rows<Pointer> rows_of(const at::Tensor& tensor, Pointer data) {
  TORCH_CHECK(tensor.dim() == 2 || tensor.dim() == 3, "rows of ", tensor.sizes());
  return {data, tensor.stride(0), tensor.dim() == 3 ? tensor.stride(1) : 0};
}

}  // namespace

InputRows input_rows(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return rows_of<const void*>(tensor, tensor.const_data_ptr());
}

OutputRows output_rows(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return rows_of<void*>(tensor, tensor.mutable_data_ptr());
}

at::Tensor workspace_on(const at::Tensor& tensor, std::int64_t floats) {
  return at::empty({floats}, tensor.options().dtype(at::kFloat));
}

}  // namespace heddle::ops::cuda
