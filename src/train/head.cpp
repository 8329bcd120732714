#include "train/head.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "base/errors.h"
#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace heddle::train {
namespace {

using models::qwen3_5::Head;

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
    none.grad_hidden = at::zeros_like(inputs.hidden);
    return none;
  }
  const bool want_weight = want_gradients && weight.trainable();
  const at::Tensor buffer = want_weight ? weight.gradient_buffer() : at::Tensor();
  return ops::linear_cross_entropy(model.kernels(), inputs, want_gradients, want_weight, buffer);
}

}  // namespace

LossRows::LossRows(const Model& model, const data::Batch& batch, double gradient_scale,
                   std::int64_t multiple) {
  const at::Tensor all_labels = batch.labels.cpu(), all_weights = batch.loss_weights.cpu();
  const auto* label = all_labels.const_data_ptr<std::int64_t>();
  const auto* weight = all_weights.const_data_ptr<float>();
  std::vector<std::int64_t> kept, others;
  for (std::int64_t t = 0; t < all_labels.numel(); ++t)
    (label[t] != data::kIgnoredLabel && weight[t] != 0 ? kept : others).push_back(t);
  const auto missing = static_cast<std::size_t>(
      (multiple - static_cast<std::int64_t>(kept.size()) % multiple) % multiple);
  others.resize(std::min(others.size(), missing));
  kept.insert(kept.end(), others.begin(), others.end());
  std::sort(kept.begin(), kept.end());

  const c10::Device target = model.context().device;
  const at::Tensor rows = at::tensor(kept, at::kLong);
  if (rows.numel() < all_labels.numel()) index = device::upload(rows, target);
  // A row without a loss has some label of the vocabulary: kernels need not look.
  labels = device::upload(all_labels.index_select(0, rows).clamp_min(0), target);
  const at::Tensor weights = all_weights.index_select(0, rows).to(model.context().wide_dtype());
  loss_weights = device::upload(weights, target);
  gradient_weights = device::upload(weights * gradient_scale, target);
}

HeadResult run_language_model_head(Model& model, const at::Tensor& hidden, const LossRows& rows,
                                   bool want_gradients) {
  if (rows.labels.numel() == 0) {
    return {at::zeros({}, rows.loss_weights.options()),
            want_gradients ? at::zeros_like(hidden) : at::Tensor()};
  }
  // Each rank along tp takes a run of the rows.
  const comm::Group& group = model.tensor_group();
  at::Tensor trunk = ops::detached(hidden);
  if (want_gradients) trunk.set_requires_grad(true);
  // Evaluation records nothing.
  const auto forward = [&] {
    return model.final_norm(
        ops::split_rows(rows.index.defined() ? trunk.index_select(0, rows.index) : trunk, group));
  };
  const at::Tensor normalized = want_gradients ? forward() : ops::run_without_gradient(forward);
  ops::LinearCrossEntropy::Inputs inputs;
  inputs.hidden = normalized;
  inputs.labels = ops::split_rows(rows.labels, group);
  inputs.loss_weights = ops::split_rows(rows.gradient_weights, group);
  const auto result = cross_entropy(model, inputs, want_gradients);
  at::Tensor loss_sum = -(result.logprobs * ops::split_rows(rows.loss_weights, group)).sum();
  group.all_reduce_sum(loss_sum);
  if (!want_gradients) return {loss_sum, {}};
  ops::run_backward({normalized}, {result.grad_hidden});
  return {loss_sum, trunk.grad()};
}

namespace {

HeadResult classification(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                          double gradient_scale, bool want_gradients) {
  const auto wide = model.context().wide_dtype();
  if (batch.targets.empty()) {
    return {at::zeros({}, hidden.options().dtype(wide).requires_grad(false)),
            want_gradients ? at::zeros_like(hidden) : at::Tensor()};
  }
  at::Tensor trunk = ops::detached(hidden);
  if (want_gradients) trunk.set_requires_grad(true);
  const auto forward = [&] {
    const at::Tensor logits =
        model.score()
            .forward(model.kernels(), model.final_norm(last_token_rows(trunk, batch)))
            .to(wide);
    const bool is_regression = model.num_labels() == 1;
    // The dtype changes on the host: not every device has float64.
    const at::Tensor targets =
        device::upload(at::tensor(batch.targets, at::kDouble).to(is_regression ? wide : at::kLong),
                       hidden.device());
    if (is_regression) return at::mse_loss(logits.squeeze(1), targets, at::Reduction::Sum);
    return at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum);
  };
  if (!want_gradients) return {ops::run_without_gradient(forward), {}};
  const at::Tensor loss = forward();
  ops::run_backward({loss}, {ops::run_without_gradient([&] {
                      return at::full({}, gradient_scale, loss.options().requires_grad(false));
                    })});
  return {ops::detached(loss), trunk.grad()};
}

}  // namespace

at::Tensor last_token_rows(const at::Tensor& hidden, const data::Batch& batch) {
  return hidden.index_select(0, device::upload(batch.last_tokens, hidden.device()));
}

HeadResult run_head(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                    double gradient_scale, bool want_gradients) {
  switch (model.head()) {
    case Head::kLanguageModel:
      return run_language_model_head(model, hidden, LossRows(model, batch, gradient_scale),
                                     want_gradients);
    case Head::kClassify:
      return classification(model, hidden, batch, gradient_scale, want_gradients);
    case Head::kEmbed:
      break;
  }
  throw InternalError("the loss of an embedding spans micro-batches: train_embed_head");
}

at::Tensor embed_head(Model& model, const at::Tensor& hidden, const data::Batch& batch) {
  return model.final_norm(last_token_rows(hidden, batch));
}

HeadResult train_embed_head(
    Model& model, const at::Tensor& hidden, const data::Batch& batch,
    const std::function<ContrastiveResult(const at::Tensor& embeddings)>& loss) {
  at::Tensor trunk = ops::detached(hidden);
  trunk.set_requires_grad(true);
  const at::Tensor embeddings = embed_head(model, trunk, batch);
  const ContrastiveResult result = loss(ops::detached(embeddings));
  ops::run_backward({embeddings}, {result.gradient});
  return {result.loss_sum, trunk.grad()};
}

ScoreResult score_head(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                       bool normalize_embedding) {
  const ops::NoGradient guard;
  const auto wide = model.context().wide_dtype();
  ScoreResult result;
  if (model.head() == Head::kLanguageModel) {
    at::Tensor labels = device::upload(batch.labels, hidden.device());
    const auto scored = ops::linear_cross_entropy(
        model.kernels(), {model.final_norm(hidden), model.head_weight().data(), labels, {}, 1},
        false, false);
    result.logprobs = scored.logprobs;
    return result;
  }
  const at::Tensor last = embed_head(model, hidden, batch);
  if (model.head() == Head::kClassify) {
    result.outputs = model.score().forward(model.kernels(), last).to(wide);
  } else {
    result.outputs = last.to(wide);
    if (normalize_embedding) {
      result.outputs =
          result.outputs / at::linalg_vector_norm(result.outputs, 2, {-1}, true).clamp_min(1e-12);
    }
  }
  return result;
}

}  // namespace heddle::train
