// The head in chunks of rows: product, npu_cross_entropy_loss and its backward. Rows without a
// label are not dropped, as finding them would wait for the device: they count with weight 0.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/compute_type.h"
#include "ops/linear_cross_entropy/kernels.h"
#include "ops/npu/call.h"
#include "ops/npu/kernels.h"

namespace heddle::ops::linear_cross_entropy_npu {
namespace {

/// Logits, their log-probabilities and gradients are held at once: 3 GB of fp32 at a vocabulary of
/// 248,320.
constexpr std::int64_t kChunk = 1024;

LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& in, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer) {
  const auto wide = in.hidden.options().dtype(compute_type(in.hidden));
  const std::int64_t rows = in.hidden.size(0);
  const at::Tensor is_labelled = (in.labels != -100).to(wide.dtype());
  const at::Tensor labels = in.labels.clamp_min(0);
  const at::Tensor loss_weights =
      in.loss_weights.defined() ? in.loss_weights.to(wide.dtype()) * is_labelled : is_labelled;
  LinearCrossEntropy::Result result;
  result.logprobs = at::zeros({rows}, wide);
  if (in.want_entropy) result.entropy = at::zeros({rows}, wide);
  if (want_grad_hidden) result.grad_hidden = at::empty_like(in.hidden);
  if (want_grad_weight && !grad_weight_buffer.defined())
    grad_weight_buffer = at::zeros(in.weight.sizes(), in.gradient_options());
  HeadChanges changes(in, want_grad_hidden);
  for (std::int64_t begin = 0; begin < rows; begin += kChunk) {
    const std::int64_t count = std::min(kChunk, rows - begin);
    const at::Tensor h = in.hidden.narrow(0, begin, count);
    at::Tensor logits = in.logits.defined() ? in.logits : at::mm(h, in.weight.t()).to(wide.dtype());
    if (!in.logits.defined()) changes.add_to(logits, begin);
    const bool keeps = in.keep_logits && count == rows;
    if (keeps) result.logits = logits;
    const at::Tensor label = labels.narrow(0, begin, count);
    const std::string reduction = "none";
    const auto loss = npu::call("npu_cross_entropy_loss",
                                {{"input", logits}, {"target", label}, {"reduction", reduction}});
    const at::Tensor kept = is_labelled.narrow(0, begin, count);
    result.logprobs.narrow(0, begin, count).copy_(-loss[0] * kept);
    at::Tensor entropy_part;
    if (in.want_entropy) {
      // In the memory of the logits, if nothing reads them any more.
      at::Tensor p = keeps ? at::exp(loss[1]) : at::exp_out(logits, loss[1]);
      at::Tensor entropy = result.entropy.narrow(0, begin, count);
      if (in.entropy_gradients.defined()) {
        entropy.sub_(at::sum(p * loss[1], {1}) * kept);
        entropy_part = in.entropy_part(begin, p, loss[1], entropy);
      } else {
        entropy.sub_(at::sum(p.mul_(loss[1]), {1}) * kept);
      }
    }
    if (!want_grad_hidden && !want_grad_weight) continue;
    const at::Tensor d_loss =
        in.token_loss ? in.token_factors(begin, result.logprobs.narrow(0, begin, count)).squeeze(1)
                      : loss_weights.narrow(0, begin, count) * in.gradient_scale;
    at::Tensor d_logits =
        npu::call("npu_cross_entropy_loss_backward", {{"grad_loss", d_loss},
                                                      {"log_prob", loss[1]},
                                                      {"target", label},
                                                      {"reduction", reduction}})[0];
    if (entropy_part.defined()) d_logits = d_logits + entropy_part;
    d_logits = d_logits.to(in.hidden.scalar_type());
    if (want_grad_hidden)
      result.grad_hidden.narrow(0, begin, count).copy_(at::mm(d_logits, in.weight));
    changes.take(d_logits, begin);
    if (!want_grad_weight) continue;
    if (grad_weight_buffer.scalar_type() == d_logits.scalar_type()) {
      grad_weight_buffer.addmm_(d_logits.t(), h);
    } else {
      grad_weight_buffer.add_(at::mm(d_logits.t(), h));
    }
  }
  result.loss_sum = -at::sum(result.logprobs * loss_weights);
  result.grad_changes = changes.gradients();
  if (want_grad_weight) result.grad_weight = grad_weight_buffer;
  return result;
}

}  // namespace

}  // namespace heddle::ops::linear_cross_entropy_npu

namespace heddle::ops::npu {

void add_linear_cross_entropy(Registry& registry) {
  using namespace linear_cross_entropy_npu;
  registry.add<LinearCrossEntropy>(KernelInfo::ascend("npu.cross_entropy_loss", dtypes()),
                                   {forward});
}

}  // namespace heddle::ops::npu
