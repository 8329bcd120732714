// Joins the CUDA kernel of conv_decode with ATen.
#include "ops/causal_conv1d/cuda/decode.h"

#include <ATen/ops/empty.h>

#include "ops/causal_conv1d/kernels.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"

namespace heddle::ops::causal_conv1d_cuda {
namespace {

at::Tensor decode(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& states,
                  const CacheRows& rows) {
  const cuda::OnDevice on(x);
  const at::Tensor taps = weight.contiguous();
  at::Tensor y = at::empty(x.sizes(), x.options());
  cuda::ConvDecodeArguments a{};
  a.type = cuda::element_of(x);
  a.weight_type = cuda::element_of(taps);
  a.batch = static_cast<int>(x.size(0));
  a.channels = static_cast<int>(x.size(1));
  a.width = static_cast<int>(weight.size(1));
  a.x = cuda::input_rows(x);
  a.weight = taps.const_data_ptr();
  a.states = states.mutable_data_ptr();
  a.slots = rows.slots.const_data_ptr<std::int64_t>();
  a.y = y.mutable_data_ptr();
  cuda::conv_decode(a, on.stream());
  return y;
}

}  // namespace

}  // namespace heddle::ops::causal_conv1d_cuda

namespace heddle::ops::cuda {

void add_conv_decode(Registry& registry) {
  using namespace causal_conv1d_cuda;
  registry.add<ConvDecode>(KernelInfo::cuda("cuda.fused"), {decode});
}

}  // namespace heddle::ops::cuda
