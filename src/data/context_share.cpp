#include "data/context_share.h"

#include <algorithm>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

namespace heddle::data {
namespace {

/// The rank's entries of the last dimension.
at::Tensor kept(const at::Tensor& by_token, const ops::ContextPlan& plan) {
  std::vector<at::Tensor> parts;
  for (const std::int64_t j : plan.held(plan.rank()))
    parts.push_back(by_token.narrow(-1, plan.begin(j), plan.end(j) - plan.begin(j)));
  return at::cat(parts, -1);
}

bool holds_last_token(const ops::Fragment& fragment, const Batch& whole) {
  return !fragment.leaves && fragment.sequence < whole.real_sequences;
}

}  // namespace

std::vector<std::int64_t> sequences_ending_here(const Batch& whole, const ops::ContextPlan& plan) {
  std::vector<std::int64_t> sequences;
  for (const ops::Fragment& fragment : plan.fragments()) {
    if (holds_last_token(fragment, whole)) sequences.push_back(fragment.sequence);
  }
  return sequences;
}

Batch with_dummy_tail(Batch batch, std::int64_t tokens) {
  const std::int64_t missing = tokens - batch.size();
  if (missing <= 0) return batch;
  at::Tensor positions = at::arange(missing, at::kLong);
  if (batch.position_ids.dim() == 2) positions = positions.expand({3, missing});
  batch.tokens = at::cat({batch.tokens, at::zeros({missing}, at::kLong)});
  batch.position_ids = at::cat({batch.position_ids, positions}, -1);
  batch.labels = at::cat({batch.labels, at::full({missing}, kIgnoredLabel, at::kLong)});
  batch.loss_weights = at::cat({batch.loss_weights, at::zeros({missing}, at::kFloat)});
  batch.cu_seqlens_host.push_back(static_cast<std::int32_t>(tokens));
  batch.cu_seqlens = at::tensor(batch.cu_seqlens_host, at::kInt);
  batch.max_seqlen = std::max(batch.max_seqlen, missing);
  return batch;
}

Batch context_share(const Batch& whole, const ops::ContextPlan& plan) {
  Batch share;
  share.tokens = kept(whole.tokens, plan);
  share.position_ids = kept(whole.position_ids, plan);
  share.labels = kept(whole.labels, plan);
  share.loss_weights = kept(whole.loss_weights, plan);
  if (whole.token_numbers.defined()) share.token_numbers = kept(whole.token_numbers, plan);
  share.cu_seqlens_host.push_back(0);
  for (const ops::Fragment& fragment : plan.fragments()) {
    share.cu_seqlens_host.push_back(static_cast<std::int32_t>(fragment.row + fragment.size()));
    share.max_seqlen = std::max(share.max_seqlen, fragment.size());
    const std::int64_t real =
        std::min(fragment.end, whole.real_tokens) - std::min(fragment.begin, whole.real_tokens);
    share.real_tokens += real;
    if (!holds_last_token(fragment, whole)) continue;
    share.last_tokens.push_back(fragment.row + fragment.size() - 1);
    const auto pick = [&](auto& to, const auto& from) {
      if (!from.empty()) to.push_back(from[static_cast<std::size_t>(fragment.sequence)]);
    };
    pick(share.row_ids, whole.row_ids);
    pick(share.targets, whole.targets);
    pick(share.text_of_row, whole.text_of_row);
  }
  share.cu_seqlens = at::tensor(share.cu_seqlens_host, at::kInt);
  share.real_sequences = static_cast<std::int64_t>(share.last_tokens.size());
  if (!whole.targets.empty()) {
    share.loss_rows = share.real_sequences;
    share.loss_weight_sum = static_cast<double>(share.real_sequences);
    return share;
  }
  const auto* labels = share.labels.const_data_ptr<std::int64_t>();
  const auto* weights = share.loss_weights.const_data_ptr<float>();
  for (std::int64_t t = 0; t < share.size(); ++t) {
    share.loss_rows += labels[t] != kIgnoredLabel && weights[t] != 0;
    share.loss_weight_sum += weights[t];
  }
  return share;
}

}  // namespace heddle::data
