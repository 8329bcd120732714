#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/compute_type.h"
#include "ops/linear_cross_entropy/kernels.h"

namespace heddle::ops::linear_cross_entropy_reference {
namespace {

/// Rows of logits held at once. On an accelerator enough rows to fill it, on the CPU about 16 MB.
std::int64_t chunk_rows(const at::Tensor& weight) {
  if (!weight.is_cpu()) return 4096;
  return std::max<std::int64_t>(16, (std::int64_t{16} << 20) / 4 / weight.size(0));
}

/// a b^T in fp32 (fp64): the product of half precision on CUDA keeps its fp32 sums.
at::Tensor product(const at::Tensor& a, const at::Tensor& b, c10::ScalarType type) {
  if (a.scalar_type() == type) return at::mm(a, b.t());
  if (a.is_cuda()) return at::mm(a, b.t(), type);
  return at::mm(a.to(type), b.to(type).t());
}

}  // namespace

LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& in, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer) {
  const c10::ScalarType type = compute_type(in.hidden);
  const auto options = in.hidden.options().dtype(type);
  const std::int64_t rows = in.hidden.size(0);
  const at::Tensor kept = in.all_rows_labelled ? at::arange(rows, in.labels.options())
                                               : at::nonzero(in.labels != -100).squeeze(1);
  const at::Tensor hidden = at::index_select(in.hidden, 0, kept);
  const at::Tensor labels = at::index_select(in.labels, 0, kept).unsqueeze(1);
  const at::Tensor loss_weights = in.loss_weights.defined()
                                      ? at::index_select(in.loss_weights, 0, kept).to(type)
                                      : at::ones({kept.size(0)}, options);
  LinearCrossEntropy::Result result;
  at::Tensor logprobs = at::empty({kept.size(0)}, options);
  at::Tensor entropy, grad_hidden;
  if (in.want_entropy) entropy = at::zeros({kept.size(0)}, options);
  if (want_grad_hidden) grad_hidden = at::empty(hidden.sizes(), hidden.options());
  if (want_grad_weight && !grad_weight_buffer.defined()) {
    grad_weight_buffer = at::zeros(in.weight.sizes(), in.gradient_options());
  }
  HeadChanges changes(in, want_grad_hidden);
  const std::int64_t chunk = chunk_rows(in.weight);
  for (std::int64_t begin = 0; begin < kept.size(0); begin += chunk) {
    const std::int64_t count = std::min(chunk, kept.size(0) - begin);
    const at::Tensor h = hidden.narrow(0, begin, count);
    at::Tensor logits = in.logits.defined() ? in.logits : product(h, in.weight, type);
    if (!in.logits.defined()) changes.add_to(logits, begin);
    const at::Tensor label = labels.narrow(0, begin, count);
    const at::Tensor lse = at::logsumexp(logits, {1}, /*keepdim=*/true);
    logprobs.narrow(0, begin, count).copy_((at::gather(logits, 1, label) - lse).squeeze(1));
    const bool keeps = in.keep_logits && count == kept.size(0);
    if (keeps) result.logits = logits;
    if (!want_grad_hidden && !want_grad_weight && !in.want_entropy) continue;
    at::Tensor log_p = keeps ? logits - lse : logits.sub_(lse);
    at::Tensor p = in.want_entropy ? at::exp(log_p) : log_p.exp_(), entropy_part;
    if (in.entropy_gradients.defined()) {
      at::Tensor chunk_entropy = entropy.narrow(0, begin, count);
      chunk_entropy.sub_(at::sum(log_p * p, {1}));
      entropy_part = in.entropy_part(begin, p, log_p, chunk_entropy);
    } else if (in.want_entropy) {
      entropy.narrow(0, begin, count).sub_(at::sum(log_p.mul_(p), {1}));
    }
    if (!want_grad_hidden && !want_grad_weight) continue;
    const at::Tensor factor =
        in.token_loss ? in.token_factors(begin, logprobs.narrow(0, begin, count))
                      : (loss_weights.narrow(0, begin, count) * in.gradient_scale).unsqueeze(1);
    at::Tensor d_logits = p.mul_(factor);
    d_logits.scatter_add_(1, label, -factor);
    if (entropy_part.defined()) d_logits.add_(entropy_part);
    if (d_logits.is_cuda()) d_logits = d_logits.to(in.hidden.scalar_type());
    if (want_grad_hidden) {
      grad_hidden.narrow(0, begin, count)
          .copy_(at::mm(d_logits, in.weight.to(d_logits.scalar_type())));
    }
    changes.take(d_logits, begin);
    if (want_grad_weight) {
      const at::Tensor h_same = h.to(d_logits.scalar_type());
      if (grad_weight_buffer.scalar_type() == d_logits.scalar_type()) {
        grad_weight_buffer.addmm_(d_logits.t(), h_same);
      } else {
        grad_weight_buffer.add_(at::mm(d_logits.t(), h_same));
      }
    }
  }
  result.loss_sum = -at::sum(logprobs * loss_weights);
  result.logprobs = at::zeros({rows}, options).index_copy_(0, kept, logprobs);
  if (in.want_entropy) {
    // Values below 0 come from the rounding of the logsumexp.
    result.entropy = at::zeros({rows}, options).index_copy_(0, kept, entropy.clamp_min_(0));
  }
  if (want_grad_hidden) {
    result.grad_hidden =
        at::zeros(in.hidden.sizes(), in.hidden.options()).index_copy_(0, kept, grad_hidden);
  }
  result.grad_changes = changes.gradients();
  if (want_grad_weight) result.grad_weight = grad_weight_buffer;
  return result;
}

}  // namespace heddle::ops::linear_cross_entropy_reference
