#include "objective/language_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

#include "nn/low_rank.h"
#include "ops/autograd.h"
#include "ops/collectives.h"

namespace heddle::objective {
namespace {

/// Cross-entropy of normalized rows [n,H], which may be none.
ops::LinearCrossEntropy::Result cross_entropy(Model& model, ops::LinearCrossEntropy::Inputs inputs,
                                              bool want_gradients) {
  const ops::NoGradient guard;
  nn::Parameter& weight = model.head_weight();
  inputs.hidden = ops::detached(inputs.hidden);
  inputs.weight = weight.data();
  inputs.all_rows_labelled = true;
  if (inputs.hidden.size(0) == 0) {
    ops::LinearCrossEntropy::Result none;
    none.logprobs = at::zeros({0}, inputs.hidden.options().dtype(model.context().wide_dtype()));
    none.entropy = none.logprobs;
    none.grad_hidden = at::zeros_like(inputs.hidden);
    return none;
  }
  const bool want_weight = want_gradients && weight.trainable();
  inputs.gradient_dtype = weight.gradient_dtype();
  const at::Tensor buffer = want_weight ? weight.gradient() : at::Tensor();
  auto result =
      ops::linear_cross_entropy(model.kernels(), inputs, want_gradients, want_weight, buffer);
  if (want_weight && !buffer.defined()) weight.add_gradient(result.grad_weight);
  return result;
}

/// normalized_rows(), from which the logits divided by `temperature` follow; recorded only if there
/// will be gradients.
at::Tensor head_rows(Model& model, const at::Tensor& trunk, const LossRows& rows,
                     bool want_gradients, double temperature) {
  const auto forward = [&] {
    const at::Tensor normalized = normalized_rows(model, trunk, rows);
    // The head is linear: its logits are divided with the states that it reads.
    return temperature == 1 ? normalized : normalized / temperature;
  };
  return want_gradients ? forward() : ops::run_without_gradient(forward);
}

}  // namespace

HeadResult run_language_model_head(Model& model, const at::Tensor& hidden, const LossRows& rows,
                                   bool want_gradients) {
  if (rows.total == 0) {
    const at::Tensor nothing = at::zeros({}, rows.loss_weights.options());
    if (!want_gradients) return {nothing, {}, {}};
    return {nothing, at::zeros_like(hidden), {nothing}};
  }
  const comm::Group& group = model.tensor_group();
  at::Tensor trunk = ops::detached(hidden);
  if (want_gradients) trunk.set_requires_grad(true);
  const at::Tensor normalized = head_rows(model, trunk, rows, want_gradients, 1);
  ops::LinearCrossEntropy::Inputs inputs;
  inputs.hidden = normalized;
  inputs.labels = rows.labels;
  inputs.loss_weights = rows.gradient_weights;
  inputs.want_entropy = want_gradients;
  const auto result = cross_entropy(model, inputs, want_gradients);
  at::Tensor loss_sum = -(result.logprobs * rows.loss_weights).sum();
  if (!want_gradients) {
    group.all_reduce_sum(loss_sum);
    return {loss_sum, {}, {}};
  }
  at::Tensor sums = at::stack({loss_sum, (result.entropy * rows.loss_weights).sum()});
  group.all_reduce_sum(sums);
  ops::run_backward({normalized}, {result.grad_hidden});
  return {sums[0], trunk.grad(), {sums[1]}};
}

std::vector<HeadFunction> LanguageModel::heads(std::span<const data::Batch> micro_batches,
                                               const PassOptions& options) {
  return std::vector<HeadFunction>(
      micro_batches.size(),
      language_model_head(model(), options.gradient_scale, options.wants_gradients));
}

HeadFunction language_model_head(Model& model, double gradient_scale, bool want_gradients) {
  return
      [&model, gradient_scale, want_gradients](const at::Tensor& hidden, const LocalBatch& batch) {
        return run_language_model_head(model, hidden, LossRows(model, batch.host, gradient_scale),
                                       want_gradients);
      };
}

TokenLossResult run_token_loss(Model& model, const at::Tensor& hidden, const LossRows& rows,
                               const ops::LinearCrossEntropy::TokenLoss& loss, bool want_gradients,
                               double temperature, const at::Tensor& entropy_gradients) {
  if (rows.total == 0) {
    const at::Tensor none = at::zeros({0}, rows.loss_weights.options());
    return {none, none, want_gradients ? at::zeros_like(hidden) : at::Tensor()};
  }
  at::Tensor trunk = ops::detached(hidden);
  if (want_gradients) trunk.set_requires_grad(true);
  const at::Tensor normalized = head_rows(model, trunk, rows, want_gradients, temperature);
  ops::LinearCrossEntropy::Inputs inputs;
  inputs.hidden = normalized;
  inputs.labels = rows.labels;
  inputs.want_entropy = true;
  if (want_gradients) {
    inputs.token_loss = loss;
    inputs.entropy_gradients = entropy_gradients;
  }
  const auto result = cross_entropy(model, inputs, want_gradients);
  if (!want_gradients) {
    if (result.logprobs.numel() > 0) loss(0, result.logprobs);
    return {result.logprobs, result.entropy, {}};
  }
  ops::run_backward({normalized}, {result.grad_hidden});
  return {result.logprobs, result.entropy, trunk.grad()};
}

TokenLogprobs::TokenLogprobs(Model& model, const at::Tensor& hidden, const LossRows& rows,
                             Options options)
    : model_(model), rows_(rows), options_(std::move(options)), trunk_(ops::detached(hidden)) {
  values_ = at::zeros({0}, rows.loss_weights.options());
  if (options_.want_entropy) entropy_ = values_;
  if (rows.total == 0) return;
  if (options_.want_gradients) trunk_.set_requires_grad(true);
  normalized_ = head_rows(model, trunk_, rows, options_.want_gradients, options_.temperature);
  options_.want_gradients ? change_rows() : ops::run_without_gradient([this] { change_rows(); });
  ops::LinearCrossEntropy::Inputs inputs = head_inputs();
  inputs.want_entropy = options_.want_entropy;
  const bool is_frozen = options_.want_gradients && !model.head_weight().trainable() &&
                         !options_.entropy_gradients.defined();
  const bool is_one_pass = is_frozen && changes_.empty(),
             is_known = is_frozen && !is_one_pass && options_.known_derivatives.defined();
  inputs.keep_logits = options_.want_gradients && !is_one_pass && !is_known;
  // The operator's loss is the sum of loss weight x -log p.
  if (is_known) inputs.loss_weights = -options_.known_derivatives;
  auto result = cross_entropy(model, inputs, is_one_pass || is_known);
  logits_ = result.logits;
  values_ = result.logprobs;
  if (options_.want_entropy) entropy_ = result.entropy;
  if (is_one_pass) unit_gradient_ = result.grad_hidden;
  if (is_known) known_ = Gradients{result.grad_hidden, std::move(result.grad_changes)};
}

ops::LinearCrossEntropy::Inputs TokenLogprobs::head_inputs() const {
  ops::LinearCrossEntropy::Inputs inputs;
  inputs.hidden = normalized_;
  inputs.changes = changes_;
  inputs.labels = rows_.labels;
  inputs.support = options_.support;
  return inputs;
}

void TokenLogprobs::change_rows() {
  std::int64_t first = 0;
  for (const ChangedHeadRows& part : options_.changed) {
    if (part.change != nullptr && part.rows > 0) {
      const at::Tensor low = nn::linears(model_.kernels(), normalized_.narrow(0, first, part.rows),
                                         {&part.change->a()})[0] *
                             part.change->scaling();
      changes_.push_back({first, low, part.change->b().data()});
    }
    first += part.rows;
  }
  TORCH_CHECK(options_.changed.empty() || first == normalized_.size(0), "adapters of ", first,
              " rows of the head for ", normalized_.size(0));
}

at::Tensor TokenLogprobs::gradient(const at::Tensor& d_values) {
  if (rows_.total == 0) return ops::run_without_gradient([&] { return at::zeros_like(trunk_); });
  const Gradients found = known_ ? *std::exchange(known_, std::nullopt) : gradients_of(d_values);
  ops::Tensors outputs = {normalized_}, gradients = {found.normalized};
  std::size_t next = 0;
  for (const ChangedHeadRows& part : options_.changed) {
    if (part.change == nullptr || part.rows == 0) continue;
    const ops::LinearCrossEntropy::ChangeGradient& own = found.changes.at(next);
    if (part.change->b().trainable()) part.change->b().add_gradient(own.weight);
    outputs.push_back(changes_[next++].low);
    gradients.push_back(own.low);
  }
  ops::run_backward(outputs, gradients);
  return trunk_.grad();
}

TokenLogprobs::Gradients TokenLogprobs::gradients_of(const at::Tensor& d_values) {
  if (unit_gradient_.defined()) {
    return {ops::run_without_gradient([&] {
              return (unit_gradient_ * -d_values.unsqueeze(1)).to(unit_gradient_.scalar_type());
            }),
            {}};
  }
  ops::LinearCrossEntropy::Inputs inputs = head_inputs();
  inputs.loss_weights = -d_values;
  inputs.entropy_gradients = options_.entropy_gradients;
  inputs.want_entropy = options_.entropy_gradients.defined();
  inputs.logits = std::exchange(logits_, {});
  auto result = cross_entropy(model_, inputs, /*want_gradients=*/true);
  return {result.grad_hidden, std::move(result.grad_changes)};
}

}  // namespace heddle::objective
