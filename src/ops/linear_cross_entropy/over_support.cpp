#include <ATen/TensorOperators.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "ops/compute_type.h"
#include "ops/linear_cross_entropy/kernels.h"

namespace heddle::ops::linear_cross_entropy_over_support {
namespace {

/// Elements of the head's rows that are gathered at a time.
std::int64_t gathered(const at::Tensor& weight) {
  return std::int64_t{1} << (weight.is_cpu() ? 22 : 26);
}

/// Adds d_logits [c,k] x hidden [c,H] to the rows `ids` [c,k] of the gradient: summed in the wide
/// type first, as a row may occur many times.
void add_to_rows(at::Tensor& gradient, const at::Tensor& ids, const at::Tensor& d_logits,
                 const at::Tensor& hidden) {
  const auto [rows, place, counts] = at::_unique2(ids.flatten(), true, true, false);
  at::Tensor sums = at::zeros({rows.size(0), hidden.size(1)}, d_logits.options());
  const at::Tensor each = d_logits.unsqueeze(2) * hidden.unsqueeze(1);
  sums.index_add_(0, place.flatten(), each.flatten(0, 1));
  gradient.index_add_(0, rows, sums.to(gradient.scalar_type()));
}

}  // namespace

LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& in, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer) {
  const c10::ScalarType type = compute_type(in.hidden);
  const auto options = in.hidden.options().dtype(type);
  const std::int64_t rows = in.hidden.size(0), k = in.support.size(1), H = in.hidden.size(1);
  const at::Tensor weights =
      in.loss_weights.defined() ? in.loss_weights.to(type) : at::ones({rows}, options);
  LinearCrossEntropy::Result result;
  result.logprobs = at::empty({rows}, options);
  if (in.want_entropy) result.entropy = at::empty({rows}, options);
  if (want_grad_hidden) result.grad_hidden = at::empty(in.hidden.sizes(), in.hidden.options());
  if (want_grad_weight && !grad_weight_buffer.defined())
    grad_weight_buffer = at::zeros(in.weight.sizes(), in.gradient_options());
  const std::int64_t chunk = std::max<std::int64_t>(1, gathered(in.weight) / (k * H));
  for (std::int64_t begin = 0; begin < rows; begin += chunk) {
    const std::int64_t count = std::min(chunk, rows - begin);
    const at::Tensor support = in.support.narrow(0, begin, count), is_none = support.lt(0),
                     ids = support.clamp_min(0),
                     label = in.labels.narrow(0, begin, count).unsqueeze(1),
                     is_label = support.eq(label);
    TORCH_CHECK(is_label.any(1).all().item<bool>(),
                "linear_cross_entropy: a label is not in the support of its row");
    const at::Tensor hidden = in.hidden.narrow(0, begin, count).to(type);
    const at::Tensor head =
        at::index_select(in.weight, 0, ids.flatten()).to(type).view({count, k, H});
    const at::Tensor logits = at::bmm(head, hidden.unsqueeze(2))
                                  .squeeze(2)
                                  .masked_fill(is_none, -std::numeric_limits<double>::infinity());
    const at::Tensor log_p = logits - at::logsumexp(logits, {1}, /*keepdim=*/true);
    result.logprobs.narrow(0, begin, count)
        .copy_(at::sum(log_p.masked_fill(is_label.logical_not(), 0), {1}));
    const at::Tensor p = at::exp(log_p);
    if (in.want_entropy) {
      result.entropy.narrow(0, begin, count)
          .copy_(-at::sum(p * log_p.masked_fill(is_none, 0), {1}));
    }
    if (!want_grad_hidden && !want_grad_weight) continue;
    const at::Tensor factor = (weights.narrow(0, begin, count) * in.gradient_scale).unsqueeze(1);
    at::Tensor d_logits = (p - is_label.to(type)) * factor;
    if (in.entropy_gradients.defined())
      d_logits.add_(in.entropy_part(begin, p, log_p, result.entropy.narrow(0, begin, count)));
    if (want_grad_hidden) {
      result.grad_hidden.narrow(0, begin, count)
          .copy_(at::bmm(d_logits.unsqueeze(1), head).squeeze(1));
    }
    if (want_grad_weight) add_to_rows(grad_weight_buffer, ids, d_logits, hidden);
  }
  result.loss_sum = -at::sum(result.logprobs * weights);
  if (want_grad_weight) result.grad_weight = grad_weight_buffer;
  return result;
}

}  // namespace heddle::ops::linear_cross_entropy_over_support
