#include "train/head.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <span>
#include <utility>

#include "base/errors.h"
#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace heddle::train {
namespace {

using models::Head;

/// Rows of the whole batch [T] with a label and a weight, and others so that their number is a
/// multiple if there are enough; in order.
std::vector<std::int64_t> rows_with_loss(const at::Tensor& labels, const at::Tensor& weights,
                                         std::int64_t multiple) {
  const auto* label = labels.const_data_ptr<std::int64_t>();
  const auto* weight = weights.const_data_ptr<float>();
  std::vector<std::int64_t> kept, others;
  kept.reserve(static_cast<std::size_t>(labels.numel()));
  for (std::int64_t t = 0; t < labels.numel(); ++t)
    (label[t] != data::kIgnoredLabel && weight[t] != 0 ? kept : others).push_back(t);
  const auto missing = static_cast<std::size_t>(
      (multiple - static_cast<std::int64_t>(kept.size()) % multiple) % multiple);
  others.resize(std::min(others.size(), missing));
  const auto labelled = static_cast<std::ptrdiff_t>(kept.size());
  kept.insert(kept.end(), others.begin(), others.end());
  std::inplace_merge(kept.begin(), kept.begin() + labelled, kept.end());
  return kept;
}

/// Places in a list, from `first` up to before `last`.
struct Run {
  std::int64_t first, last;
};
std::int64_t overlap(const Run& a, const Run& b) {
  return std::max<std::int64_t>(0, std::min(a.last, b.last) - std::max(a.first, b.first));
}

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

}  // namespace

LossRows::LossRows(const Model& model, const data::Batch& batch, double gradient_scale,
                   std::int64_t multiple) {
  const at::Tensor all_labels = batch.labels.cpu(), all_weights = batch.loss_weights.cpu();
  const std::vector<std::int64_t> kept = rows_with_loss(all_labels, all_weights, multiple);
  total = static_cast<std::int64_t>(kept.size());

  const comm::Group& group = model.tensor_group();
  // Those of `kept` that lie in a rank's rows, and those that it takes to the head.
  const auto held_by = [&](std::int64_t rank) {
    const ops::Rows rows = ops::rows_of_member(batch.size(), rank, group);
    const auto place = [&](std::int64_t row) {
      return std::lower_bound(kept.begin(), kept.end(), row) - kept.begin();
    };
    return Run{place(rows.first), place(rows.first + rows.count)};
  };
  const auto taken_by = [&](std::int64_t rank) {
    const std::int64_t length = (total + group.size() - 1) / group.size();
    return Run{std::min(rank * length, total), std::min((rank + 1) * length, total)};
  };
  const Run held = held_by(group.rank()), taken = taken_by(group.rank());
  bool moves = false;
  for (std::int64_t rank = 0; rank < group.size(); ++rank) {
    const Run there = held_by(rank), wanted = taken_by(rank);
    moves = moves || there.first != wanted.first || there.last != wanted.last;
    sent.push_back(overlap(held, wanted));
    received.push_back(overlap(there, taken));
  }
  if (!moves) sent.clear(), received.clear();

  const c10::Device target = model.context().device;
  const ops::Rows own = ops::own_rows(batch.size(), group);
  if (held.last - held.first < own.count) {
    std::vector<std::int64_t> places(kept.begin() + held.first, kept.begin() + held.last);
    for (std::int64_t& place : places) place -= own.first;
    index = device::upload(places, target);
  }
  // Loops: the device waits meanwhile, and threads take longer to wake than this takes.
  const std::span rows(kept.data() + taken.first, kept.data() + taken.last);
  const auto* label = all_labels.const_data_ptr<std::int64_t>();
  const auto* weight = all_weights.const_data_ptr<float>();
  std::vector<std::int64_t> own_labels(rows.size());
  at::Tensor weights = at::empty({taken.last - taken.first}, at::kFloat);
  // A row without a loss has some label of the vocabulary: kernels need not look.
  std::transform(rows.begin(), rows.end(), own_labels.begin(),
                 [&](std::int64_t row) { return std::max<std::int64_t>(0, label[row]); });
  std::transform(rows.begin(), rows.end(), weights.mutable_data_ptr<float>(),
                 [&](std::int64_t row) { return weight[row]; });
  labels = device::upload(own_labels, target);
  weights = weights.to(model.context().wide_dtype());
  loss_weights = device::upload(weights, target);
  gradient_weights = device::upload(weights * gradient_scale, target);
}

HeadResult run_language_model_head(Model& model, const at::Tensor& hidden, const LossRows& rows,
                                   bool want_gradients) {
  if (rows.total == 0) {
    const at::Tensor nothing = at::zeros({}, rows.loss_weights.options());
    if (!want_gradients) return {nothing, {}, {}};
    return {nothing, at::zeros_like(hidden), nothing};
  }
  const comm::Group& group = model.tensor_group();
  at::Tensor trunk = ops::detached(hidden);
  if (want_gradients) trunk.set_requires_grad(true);
  // Evaluation records nothing.
  const auto forward = [&] {
    at::Tensor x = rows.index.defined() ? trunk.index_select(0, rows.index) : trunk;
    if (!rows.sent.empty()) x = ops::all_to_all_rows(x, rows.sent, rows.received, group);
    return model.final_norm(x);
  };
  const at::Tensor normalized = want_gradients ? forward() : ops::run_without_gradient(forward);
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
  return {sums[0], trunk.grad(), sums[1]};
}

namespace {

HeadResult classification(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                          double gradient_scale, bool want_gradients) {
  const auto wide = model.context().wide_dtype();
  if (batch.targets.empty()) {
    return {at::zeros({}, hidden.options().dtype(wide).requires_grad(false)),
            want_gradients ? at::zeros_like(hidden) : at::Tensor(),
            {}};
  }
  at::Tensor trunk = ops::detached(hidden);
  if (want_gradients) trunk.set_requires_grad(true);
  const auto forward = [&] {
    const at::Tensor logits =
        model.score()
            .forward(model.kernels(), model.final_norm(last_token_rows(model, trunk, batch)))
            .to(wide);
    const bool is_regression = model.num_labels() == 1;
    // The dtype changes on the host: not every device has float64.
    const at::Tensor targets =
        device::upload(at::tensor(batch.targets, at::kDouble).to(is_regression ? wide : at::kLong),
                       hidden.device());
    if (is_regression) return at::mse_loss(logits.squeeze(1), targets, at::Reduction::Sum);
    return at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum);
  };
  if (!want_gradients) return {ops::run_without_gradient(forward), {}, {}};
  const at::Tensor loss = forward();
  ops::run_backward({loss}, {ops::run_without_gradient([&] {
                      return at::full({}, gradient_scale, loss.options().requires_grad(false));
                    })});
  return {ops::detached(loss), trunk.grad(), {}};
}

}  // namespace

at::Tensor last_token_rows(const Model& model, const at::Tensor& hidden, const data::Batch& batch) {
  const auto select = [&](const std::vector<std::int64_t>& rows) {
    return hidden.index_select(0, device::upload(rows, hidden.device()));
  };
  const comm::Group& group = model.tensor_group();
  if (group.size() == 1 || batch.last_tokens.empty()) return select(batch.last_tokens);
  const ops::Rows own = ops::own_rows(batch.size(), group);
  std::vector<std::int64_t> rows, places;
  for (std::size_t s = 0; s < batch.last_tokens.size(); ++s) {
    const std::int64_t row = batch.last_tokens[s] - own.first;
    if (row < 0 || row >= own.count) continue;
    rows.push_back(row);
    places.push_back(static_cast<std::int64_t>(s));
  }
  // One rank has each row: the sum over the ranks fills the others in.
  const auto count = static_cast<std::int64_t>(batch.last_tokens.size());
  const at::Tensor none = at::zeros({count, hidden.size(1)}, hidden.options().requires_grad(false));
  const at::Tensor mine = none.index_copy(0, device::upload(places, hidden.device()), select(rows));
  return ops::reduce_from_group(mine, group);
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
  return model.final_norm(last_token_rows(model, hidden, batch));
}

HeadResult train_embed_head(
    Model& model, const at::Tensor& hidden, const data::Batch& batch,
    const std::function<ContrastiveResult(const at::Tensor& embeddings)>& loss) {
  at::Tensor trunk = ops::detached(hidden);
  trunk.set_requires_grad(true);
  const at::Tensor embeddings = embed_head(model, trunk, batch);
  const ContrastiveResult result = loss(ops::detached(embeddings));
  ops::run_backward({embeddings}, {result.gradient});
  return {result.loss_sum, trunk.grad(), {}};
}

ScoreResult score_head(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                       const ScoreRequest& request) {
  const ops::NoGradient guard;
  const auto wide = model.context().wide_dtype();
  ScoreResult result;
  if (model.head() == Head::kLanguageModel) {
    const ops::Rows own = ops::own_rows(batch.size(), model.tensor_group());
    ops::LinearCrossEntropy::Inputs inputs;
    inputs.hidden = model.final_norm(hidden);
    inputs.weight = model.head_weight().data();
    inputs.labels = device::upload(batch.labels.narrow(0, own.first, own.count), hidden.device());
    inputs.want_entropy = request.entropy;
    const auto scored = ops::linear_cross_entropy(model.kernels(), inputs, false, false);
    result.logprobs = scored.logprobs;
    result.entropy = scored.entropy;
    return result;
  }
  const at::Tensor last = embed_head(model, hidden, batch);
  if (model.head() == Head::kClassify) {
    result.outputs = model.score().forward(model.kernels(), last).to(wide);
  } else {
    result.outputs = last.to(wide);
    if (request.normalize_embedding) {
      result.outputs =
          result.outputs / at::linalg_vector_norm(result.outputs, 2, {-1}, true).clamp_min(1e-12);
    }
  }
  return result;
}

}  // namespace heddle::train
