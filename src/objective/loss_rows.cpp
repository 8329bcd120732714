#include "objective/loss_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <algorithm>
#include <span>

#include "device/upload.h"
#include "ops/collectives.h"

namespace heddle::objective {
namespace {

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

}  // namespace

LossRows::LossRows(const Model& model, const data::Batch& batch, double gradient_scale,
                   std::int64_t multiple) {
  const at::Tensor all_labels = batch.labels.cpu(), all_weights = batch.loss_weights.cpu();
  const std::vector<std::int64_t> kept = rows_with_loss(all_labels, all_weights, multiple);
  total = static_cast<std::int64_t>(kept.size());

  const comm::Group& group = model.tensor_group();
  // Counts the `kept` rows that lie in a rank's rows, and those that it takes to the head.
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
  tokens.assign(rows.begin(), rows.end());
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

at::Tensor normalized_rows(Model& model, const at::Tensor& hidden, const LossRows& rows) {
  at::Tensor x = rows.index.defined() ? hidden.index_select(0, rows.index) : hidden;
  if (!rows.sent.empty())
    x = ops::all_to_all_rows(x, rows.sent, rows.received, model.tensor_group());
  return model.final_norm(x);
}

}  // namespace heddle::objective
