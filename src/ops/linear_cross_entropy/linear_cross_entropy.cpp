#include "ops/linear_cross_entropy/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>

#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/linear_cross_entropy/kernels.h"

namespace heddle::ops {

at::TensorOptions LinearCrossEntropy::Inputs::gradient_options() const {
  const bool is_given = gradient_dtype != c10::ScalarType::Undefined;
  return weight.options().dtype(is_given ? gradient_dtype : weight.scalar_type());
}

at::Tensor LinearCrossEntropy::Inputs::entropy_part(std::int64_t first, const at::Tensor& p,
                                                    const at::Tensor& log_p,
                                                    const at::Tensor& entropy) const {
  const at::Tensor factors = -entropy_gradients.narrow(0, first, p.size(0)).to(p.scalar_type());
  // Where p is 0, log p may be -infinity, and their product is 0.
  const at::Tensor depth = log_p.clamp_min(-1e4) + entropy.unsqueeze(1);
  return depth.mul_(p).mul_(factors.unsqueeze(1));
}

at::Tensor LinearCrossEntropy::Inputs::token_factors(std::int64_t first,
                                                     const at::Tensor& logprobs) const {
  const at::Tensor derivatives = token_loss(first, logprobs);
  TORCH_CHECK(derivatives.sizes() == logprobs.sizes() && derivatives.device() == logprobs.device(),
              "linear_cross_entropy: token_loss returned ", derivatives.sizes(), " on ",
              derivatives.device(), " for log-probabilities ", logprobs.sizes(), " on ",
              logprobs.device());
  // d logprob / d logits = one_hot(label) - softmax.
  return -derivatives.to(logprobs.scalar_type()).unsqueeze(1);
}

LinearCrossEntropy::Result linear_cross_entropy(const KernelTable& kernels,
                                                const LinearCrossEntropy::Inputs& inputs,
                                                bool want_grad_hidden, bool want_grad_weight,
                                                at::Tensor grad_weight_buffer) {
  const std::int64_t rows = inputs.hidden.size(0);
  TORCH_CHECK(inputs.hidden.dim() == 2 && inputs.weight.dim() == 2 &&
                  inputs.hidden.size(1) == inputs.weight.size(1) &&
                  inputs.hidden.scalar_type() == inputs.weight.scalar_type(),
              "linear_cross_entropy: hidden ", inputs.hidden.sizes(), " ",
              inputs.hidden.scalar_type(), " must be [N,H] and weight ", inputs.weight.sizes(), " ",
              inputs.weight.scalar_type(), " [V,H]");
  TORCH_CHECK(inputs.labels.dim() == 1 && inputs.labels.size(0) == rows &&
                  inputs.labels.scalar_type() == at::kLong,
              "linear_cross_entropy: labels ", inputs.labels.sizes(), " ",
              inputs.labels.scalar_type(), " must be int64 [N] with N = ", rows);
  TORCH_CHECK(!inputs.loss_weights.defined() ||
                  (inputs.loss_weights.dim() == 1 && inputs.loss_weights.size(0) == rows),
              "linear_cross_entropy: loss_weights must be [N] with N = ", rows);
  TORCH_CHECK(!inputs.token_loss ||
                  (inputs.all_rows_labelled && !inputs.loss_weights.defined() &&
                   inputs.gradient_scale == 1 && !inputs.keep_logits && !inputs.logits.defined() &&
                   !inputs.support.defined() && (want_grad_hidden || want_grad_weight)),
              "linear_cross_entropy: a token_loss wants rows with labels, gradients, and neither "
              "loss_weights, gradient_scale, kept logits nor a support");
  TORCH_CHECK(!inputs.entropy_gradients.defined() ||
                  (inputs.want_entropy && inputs.all_rows_labelled &&
                   inputs.entropy_gradients.dim() == 1 && inputs.entropy_gradients.size(0) == rows),
              "linear_cross_entropy: entropy_gradients must be [N] with N = ", rows,
              ", with want_entropy and a label for every row");
  TORCH_CHECK(!grad_weight_buffer.defined() || grad_weight_buffer.sizes() == inputs.weight.sizes(),
              "linear_cross_entropy: the gradient buffer must have the weight's shape ",
              inputs.weight.sizes());
  std::int64_t next = 0;
  for (const LinearCrossEntropy::Change& change : inputs.changes) {
    TORCH_CHECK(inputs.all_rows_labelled && !inputs.support.defined() && change.first >= next &&
                    change.low.dim() == 2 && change.first + change.low.size(0) <= rows &&
                    change.weight.dim() == 2 && change.weight.size(0) == inputs.weight.size(0) &&
                    change.weight.size(1) == change.low.size(1) &&
                    change.low.scalar_type() == change.weight.scalar_type(),
                "linear_cross_entropy: a change of the rows from ", change.first, " on, low ",
                change.low.sizes(), " ", change.low.scalar_type(), " and weight ",
                change.weight.sizes(), " ", change.weight.scalar_type(),
                ": expected [n,r] after row ", next, " of ", rows,
                " labelled ones without a support, and [V,r]");
    next = change.first + change.low.size(0);
  }
  const NoGradient guard;
  LinearCrossEntropy::Inputs plain = inputs;
  for (LinearCrossEntropy::Change& change : plain.changes)
    change.low = detached(change.low), change.weight = detached(change.weight);
  plain.hidden = detached(inputs.hidden);
  plain.weight = detached(inputs.weight);
  if (inputs.support.defined()) {
    TORCH_CHECK(
        inputs.support.dim() == 2 && inputs.support.size(0) == rows && inputs.support.size(1) > 0 &&
            inputs.support.scalar_type() == at::kLong && inputs.all_rows_labelled,
        "linear_cross_entropy: support ", inputs.support.sizes(), " ", inputs.support.scalar_type(),
        " must be int64 [N,k] with N = ", rows, ", every row labelled");
    return linear_cross_entropy_over_support::forward(plain, want_grad_hidden, want_grad_weight,
                                                      grad_weight_buffer);
  }
  return kernels.get<LinearCrossEntropy>().forward(plain, want_grad_hidden, want_grad_weight,
                                                   grad_weight_buffer);
}

void register_linear_cross_entropy(Registry& registry) {
  registry.add<LinearCrossEntropy>(KernelInfo::cpu("cpu"), {linear_cross_entropy_cpu::forward});
  registry.add<LinearCrossEntropy>(KernelInfo::reference(),
                                   {linear_cross_entropy_reference::forward});
}

}  // namespace heddle::ops
