// Joins the kernel of dropout with ATen.
#include <ATen/ops/empty.h>

#include "ops/cuda/tensor.h"
#include "ops/linear/cuda/dropout.h"
#include "ops/linear/kernels.h"

namespace heddle::ops::linear_cuda {
namespace {

void run(const at::Tensor& y, const at::Tensor& input, const DropoutMask& mask, bool adds) {
  const cuda::OnDevice on(input);
  const at::Tensor x = cuda::with_unit_stride(input), tokens = mask.tokens.contiguous(),
                   features = mask.features.contiguous();
  TORCH_CHECK(x.dim() == 2 && tokens.numel() == x.size(0) && features.numel() == x.size(1) &&
                  y.sizes() == x.sizes(),
              "dropout: x ", x.sizes(), " must be [T,k] with ", tokens.numel(), " tokens and ",
              features.numel(), " features, y ", y.sizes(), " too");
  const bool is_bfloat16 = x.scalar_type() == at::kBFloat16;
  const auto kept = static_cast<float>(mask.kept());
  cuda::dropout({cuda::element_of(x), x.size(0), x.size(1), mask.key,
                 static_cast<std::uint32_t>(mask.threshold()),
                 is_bfloat16 ? static_cast<float>(static_cast<c10::BFloat16>(kept)) : kept},
                cuda::input_rows(x), tokens.const_data_ptr<std::int64_t>(),
                features.const_data_ptr<std::int64_t>(), cuda::output_rows(y), adds, on.stream());
}

}  // namespace

at::Tensor dropout(const at::Tensor& x, const DropoutMask& mask) {
  const at::Tensor y = at::empty(x.sizes(), x.options());
  run(y, x, mask, /*adds=*/false);
  return y;
}

void add_dropout(at::Tensor& sum, const at::Tensor& x, const DropoutMask& mask) {
  TORCH_CHECK(sum.stride(1) == 1, "dropout: the sum's columns must lie side by side");
  run(sum, x, mask, /*adds=*/true);
}

}  // namespace heddle::ops::linear_cuda
