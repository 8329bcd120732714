#include "ops/moe/occurrences.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

namespace heddle::ops {

at::Tensor occurrences(const at::Tensor& numbers, std::int64_t count) {
  const at::Tensor flat = numbers.reshape({-1});
  return at::zeros({count}, flat.options()).scatter_add_(0, flat, at::ones_like(flat));
}

}  // namespace heddle::ops
