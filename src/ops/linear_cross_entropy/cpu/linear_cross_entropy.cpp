#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "ops/compute_type.h"
#include "ops/linear_cross_entropy/cpu/vector/softmax_rows.h"
#include "ops/linear_cross_entropy/kernels.h"

namespace heddle::ops::linear_cross_entropy_cpu {
namespace {

/// Logits held at once. They stay in the last-level cache between the product that makes them and
/// the products that use their gradient, yet the products have enough rows to run at full speed.
constexpr std::int64_t kLogitBytes = std::int64_t{8} << 20;

void softmax_rows(const SoftmaxRowKernels& kernels, at::Tensor& logits, const std::int64_t* labels,
                  const at::Tensor& factor, const at::Tensor& by_entropy, std::int64_t begin,
                  at::Tensor& logprobs, at::Tensor& entropy, bool want_gradient) {
  const std::int64_t vocab = logits.size(1);
  const auto run = [&](auto kernel, auto* rows, const auto* factors, const auto* bends,
                       auto* logprob, auto* row_entropy) {
    at::parallel_for(0, logits.size(0), 1, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) {
        kernel(rows + i * vocab, vocab, labels[begin + i],
               want_gradient ? factors + begin + i : nullptr,
               want_gradient && bends != nullptr ? bends + begin + i : nullptr, logprob + begin + i,
               row_entropy + begin + i);
      }
    });
  };
  if (logits.scalar_type() == at::kDouble) {
    run(kernels.run_double, logits.mutable_data_ptr<double>(), factor.const_data_ptr<double>(),
        by_entropy.defined() ? by_entropy.const_data_ptr<double>() : nullptr,
        logprobs.mutable_data_ptr<double>(), entropy.mutable_data_ptr<double>());
  } else {
    run(kernels.run_float, logits.mutable_data_ptr<float>(), factor.const_data_ptr<float>(),
        by_entropy.defined() ? by_entropy.const_data_ptr<float>() : nullptr,
        logprobs.mutable_data_ptr<float>(), entropy.mutable_data_ptr<float>());
  }
}

}  // namespace

LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& in, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer) {
  const c10::ScalarType type = compute_type(in.hidden);
  const auto options = in.hidden.options().dtype(type);
  const std::int64_t rows = in.hidden.size(0), vocab = in.weight.size(0);
  const at::Tensor all_labels = in.labels.contiguous();
  std::vector<std::int64_t> labels, kept_rows;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t label = all_labels.const_data_ptr<std::int64_t>()[i];
    if (label == -100) continue;
    TORCH_CHECK(label >= 0 && label < vocab, "linear_cross_entropy: label ", label, " of row ", i,
                " is not in [0, ", vocab, ")");
    labels.push_back(label);
    kept_rows.push_back(i);
  }
  const auto count = static_cast<std::int64_t>(labels.size());
  at::Tensor kept = at::empty({count}, at::kLong);
  std::copy(kept_rows.begin(), kept_rows.end(), kept.mutable_data_ptr<std::int64_t>());

  const bool want_gradient = want_grad_hidden || want_grad_weight;
  const at::Tensor hidden = at::index_select(in.hidden, 0, kept).to(type);
  const at::Tensor weight = in.weight.to(type);
  const at::Tensor loss_weights = in.loss_weights.defined()
                                      ? at::index_select(in.loss_weights, 0, kept).to(type)
                                      : at::zeros({count}, options) + 1;
  at::Tensor factor = (loss_weights * in.gradient_scale).contiguous(), by_entropy;
  if (in.entropy_gradients.defined()) by_entropy = in.entropy_gradients.to(type).contiguous();
  // A row's factor is applied to what is not as wide as the logits, unless an entropy adds to them.
  const bool scales_later = in.token_loss && !by_entropy.defined();
  at::Tensor logprobs = at::empty({count}, options), entropy = at::empty({count}, options);
  at::Tensor grad_hidden;
  if (want_grad_hidden) grad_hidden = at::empty({count, hidden.size(1)}, options);
  // Half-precision buffers are added to once, at the end.
  at::Tensor grad_weight = grad_weight_buffer;
  if (want_grad_weight && (!grad_weight.defined() || grad_weight.scalar_type() != type)) {
    grad_weight = at::zeros(in.weight.sizes(), options);
  }

  const std::int64_t element_bytes = type == at::kDouble ? 8 : 4;
  const std::int64_t chunk = std::clamp<std::int64_t>(kLogitBytes / element_bytes / vocab, 64,
                                                      std::max<std::int64_t>(count, 64));
  HeadChanges changes(in, want_grad_hidden);
  const SoftmaxRowKernels kernels = HEDDLE_CPU_SELECT(softmax_row_kernels)();
  at::Tensor buffer =
      in.logits.defined() ? in.logits : at::empty({std::min(chunk, count), vocab}, options);
  for (std::int64_t begin = 0; begin < count; begin += chunk) {
    const std::int64_t n = std::min(chunk, count - begin);
    at::Tensor h = hidden.narrow(0, begin, n);
    at::Tensor logits = buffer.narrow(0, 0, n);
    if (!in.logits.defined()) {
      at::mm_out(logits, h, weight.t());
      changes.add_to(logits, begin);
    }
    if (in.token_loss && by_entropy.defined()) {
      softmax_rows(kernels, logits, labels.data(), factor, {}, begin, logprobs, entropy, false);
      factor.narrow(0, begin, n)
          .copy_(in.token_factors(begin, logprobs.narrow(0, begin, n)).squeeze(1));
    }
    softmax_rows(kernels, logits, labels.data(), factor, by_entropy, begin, logprobs, entropy,
                 want_gradient);
    at::Tensor d_hidden;
    if (want_grad_hidden) {
      d_hidden = grad_hidden.narrow(0, begin, n);
      at::mm_out(d_hidden, logits, weight);
    }
    at::Tensor factors;
    if (scales_later) {
      // The logits hold softmax - one_hot(label).
      factors = in.token_factors(begin, logprobs.narrow(0, begin, n));
      if (want_grad_hidden) d_hidden.mul_(factors);
      if (want_grad_weight) h = h * factors;
    }
    changes.take(logits, begin, factors);
    if (want_grad_weight) grad_weight.addmm_(logits.t(), h);
  }

  LinearCrossEntropy::Result result;
  if (in.keep_logits && count <= chunk) result.logits = buffer;
  // The few per-row losses are added in fp64: the sum does not depend on the chunks.
  result.loss_sum = -(logprobs.to(at::kDouble) * loss_weights).sum().to(type);
  const auto spread = [&](const at::Tensor& values) {
    return at::zeros({rows}, options).index_copy_(0, kept, values);
  };
  result.logprobs = spread(logprobs);
  if (in.want_entropy) result.entropy = spread(entropy);
  if (want_grad_hidden) {
    result.grad_hidden = at::zeros(in.hidden.sizes(), in.hidden.options())
                             .index_copy_(0, kept, grad_hidden.to(in.hidden.scalar_type()));
  }
  result.grad_changes = changes.gradients();
  if (want_grad_weight) {
    if (!grad_weight_buffer.defined()) {
      grad_weight_buffer = grad_weight.to(in.gradient_options().dtype());
    } else if (!grad_weight_buffer.is_same(grad_weight)) {
      grad_weight_buffer.add_(grad_weight);
    }
    result.grad_weight = grad_weight_buffer;
  }
  return result;
}

}  // namespace heddle::ops::linear_cross_entropy_cpu
