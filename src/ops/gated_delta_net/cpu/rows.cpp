#include "ops/gated_delta_net/cpu/rows.h"

namespace heddle::ops::gdn_cpu {

int dtype_index(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return 0;
    case at::kBFloat16:
      return 1;
    case at::kDouble:
      return 2;
    default:
      TORCH_CHECK(false, "no CPU kernel for ", x.scalar_type());
  }
}

at::Tensor head_rows(const at::Tensor& x) {
  const bool contiguous_tokens =
      x.stride(2) == 1 && (x.stride(1) == x.size(2) || x.size(1) == 1) && x.stride(0) >= 0;
  return contiguous_tokens || x.numel() == 0 ? x : x.contiguous();
}

}  // namespace heddle::ops::gdn_cpu
