#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "ops/moe/kernels.h"

namespace heddle::ops {

void add_low_rank(const ExpertLowRank& change, std::int64_t e, const at::Tensor& x, at::Tensor low,
                  at::Tensor y) {
  if (!change.defined()) return;
  at::mm_out(low, x, change.down.select(0, e).t());
  y.addmm_(low, change.up.select(0, e).t());
}

void add_low_rank_backward(const ExpertLowRank& change, std::int64_t e, const at::Tensor& x,
                           const at::Tensor& low, const at::Tensor& dy, at::Tensor dx,
                           ExpertLowRank& gradients) {
  if (!change.defined()) return;
  const at::Tensor d_low = at::mm(dy, change.up.select(0, e));
  dx.addmm_(d_low, change.down.select(0, e));
  at::Tensor d_up = gradients.up.select(0, e), d_down = gradients.down.select(0, e);
  at::mm_out(d_up, dy.t(), low);
  at::mm_out(d_down, d_low.t(), x);
}

at::Tensor low_rank_rows(const ExpertLowRank& change, std::int64_t n) {
  return change.defined() ? at::empty({n, change.down.size(1)}, change.down.options())
                          : at::Tensor();
}

ExpertLowRank low_rank_zeros(const ExpertLowRank& change) {
  if (!change.defined()) return {};
  return {at::zeros(change.down.sizes(), change.down.options()),
          at::zeros(change.up.sizes(), change.up.options())};
}

}  // namespace heddle::ops
