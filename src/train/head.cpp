#include "train/head.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace heddle::train {
namespace {

using models::qwen3_5::Head;

/// Rows with a label and a weight.
std::vector<std::int64_t> labelled_rows(const data::Batch& batch) {
  const at::Tensor labels = batch.labels.cpu(), weights = batch.loss_weights.cpu();
  const auto* label = labels.const_data_ptr<std::int64_t>();
  const auto* weight = weights.const_data_ptr<float>();
  std::vector<std::int64_t> rows;
  rows.reserve(static_cast<std::size_t>(batch.loss_rows));
  for (std::int64_t t = 0; t < labels.numel(); ++t) {
    if (label[t] != data::kIgnoredLabel && weight[t] != 0) rows.push_back(t);
  }
  return rows;
}

/// Which labelled rows of a micro-batch each rank along tp takes to the head: runs of ceil(n / tp),
/// the last ones shorter or empty, as prompts without labels may fill the rows of one rank. All of
/// them know all of it.
class HeadRows {
 public:
  HeadRows(const data::Batch& batch, const comm::Group& group, c10::Device device)
      : group_(group), device_(device), labelled_(labelled_rows(batch)) {
    const auto own = ops::own_rows(batch.size(), group);
    const auto place = [&](std::int64_t row) {
      return std::lower_bound(labelled_.begin(), labelled_.end(), row) - labelled_.begin();
    };
    first_ = place(own.first);
    count_ = place(own.first + own.count) - first_;
    is_every_row_ = count_ == own.count;
    for (std::int64_t i = first_; i < first_ + count_; ++i)
      own_rows_.push_back(labelled_[i] - own.first);
    for (std::int64_t rank = 0; rank < group.size(); ++rank) {
      const auto rows = ops::rows_of_member(batch.size(), rank, group);
      const std::int64_t begin = place(rows.first), end = place(rows.first + rows.count);
      const auto [taken, behind] = run_of(rank);
      moves_ = moves_ || begin != taken || end != behind;
      const auto [first, last] = run_of(group.rank());
      sent_.push_back(overlap(first_, first_ + count_, taken, behind));
      received_.push_back(overlap(begin, end, first, last));
    }
  }

  /// This rank's run out of the ranks' rows [T/tp,H]; differentiable.
  at::Tensor take(const at::Tensor& hidden) const {
    const at::Tensor own =
        is_every_row_ ? hidden : hidden.index_select(0, device::upload(own_rows_, device_));
    return moves_ ? ops::all_to_all_rows(own, sent_, received_, group_) : own;
  }
  /// The run out of what every rank has of all tokens [T], on the host.
  at::Tensor take_of_all(const at::Tensor& by_token) const {
    const auto [first, last] = run_of(group_.rank());
    const std::vector<std::int64_t> rows(labelled_.begin() + first, labelled_.begin() + last);
    return device::upload(by_token.index_select(0, at::tensor(rows, at::kLong)), device_);
  }

 private:
  static std::int64_t overlap(std::int64_t a, std::int64_t a_end, std::int64_t b,
                              std::int64_t b_end) {
    return std::max<std::int64_t>(0, std::min(a_end, b_end) - std::max(a, b));
  }
  /// Of the labelled rows, the first and the one behind the last.
  std::pair<std::int64_t, std::int64_t> run_of(std::int64_t rank) const {
    const auto rows = static_cast<std::int64_t>(labelled_.size());
    const std::int64_t length = (rows + group_.size() - 1) / group_.size();
    return {std::min(rank * length, rows), std::min((rank + 1) * length, rows)};
  }

  const comm::Group& group_;
  c10::Device device_;
  std::vector<std::int64_t> labelled_;  ///< Of all T.
  std::vector<std::int64_t> own_rows_;  ///< Of this rank's rows, the labelled ones.
  std::int64_t first_, count_;          ///< They among labelled_.
  bool is_every_row_, moves_ = false;
  std::vector<std::int64_t> sent_, received_;  ///< [tp]
};

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
    none.loss_sum = at::zeros({}, inputs.hidden.options().dtype(model.context().wide_dtype()));
    none.grad_hidden = at::zeros_like(inputs.hidden);
    return none;
  }
  const bool want_weight = want_gradients && weight.trainable();
  const at::Tensor buffer = want_weight ? weight.gradient_buffer() : at::Tensor();
  return ops::linear_cross_entropy(model.kernels(), inputs, want_gradients, want_weight, buffer);
}

HeadResult language_model(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                          double gradient_scale, bool want_gradients) {
  const c10::Device device = hidden.device();
  const auto wide = hidden.options().dtype(model.context().wide_dtype()).requires_grad(false);
  if (batch.loss_rows == 0) {
    return {at::zeros({}, wide), want_gradients ? at::zeros_like(hidden) : at::Tensor()};
  }
  const HeadRows rows(batch, model.tensor_group(), device);
  at::Tensor trunk = ops::detached(hidden);
  if (want_gradients) trunk.set_requires_grad(true);
  // Evaluation records nothing.
  const auto forward = [&] { return model.final_norm(rows.take(trunk)); };
  const at::Tensor normalized = want_gradients ? forward() : ops::run_without_gradient(forward);
  ops::LinearCrossEntropy::Inputs inputs;
  inputs.hidden = normalized;
  inputs.labels = rows.take_of_all(batch.labels.cpu());
  inputs.loss_weights = rows.take_of_all(batch.loss_weights.cpu());
  inputs.gradient_scale = gradient_scale;
  auto result = cross_entropy(model, inputs, want_gradients);
  model.tensor_group().all_reduce_sum(result.loss_sum);
  if (!want_gradients) return {result.loss_sum, {}};
  ops::run_backward({normalized}, {result.grad_hidden});
  return {result.loss_sum, trunk.grad()};
}

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
  if (!want_gradients) return {ops::run_without_gradient(forward), {}};
  const at::Tensor loss = forward();
  ops::run_backward({loss}, {ops::run_without_gradient([&] {
                      return at::full({}, gradient_scale, loss.options().requires_grad(false));
                    })});
  return {ops::detached(loss), trunk.grad()};
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
      return language_model(model, hidden, batch, gradient_scale, want_gradients);
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
