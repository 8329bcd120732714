#include "data/context_share.h"

#include <algorithm>
#include <optional>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

namespace heddle::data {
namespace {

/// The rank's entries of the last dimension.
at::Tensor kept(const at::Tensor& by_token, const ops::ContextPlan& plan) {
  std::vector<at::Tensor> parts;
  for (const std::int64_t j : plan.held(plan.rank()))
    parts.push_back(by_token.narrow(-1, plan.begin(j), plan.end(j) - plan.begin(j)));
  return at::cat(parts, -1);
}

bool holds_last_token(const ops::Fragment& fragment, std::int64_t real_sequences) {
  return !fragment.leaves && fragment.sequence < real_sequences;
}

}  // namespace

std::vector<std::int64_t> sequences_ending_here(std::int64_t sequences,
                                                const ops::ContextPlan& plan) {
  std::vector<std::int64_t> ending;
  for (const ops::Fragment& fragment : plan.fragments()) {
    if (holds_last_token(fragment, sequences)) ending.push_back(fragment.sequence);
  }
  return ending;
}

std::vector<std::int64_t> sequences_of_tokens(const ops::ContextPlan& plan) {
  std::vector<std::int64_t> sequences;
  for (const ops::Fragment& fragment : plan.fragments())
    sequences.insert(sequences.end(), static_cast<std::size_t>(fragment.size()), fragment.sequence);
  return sequences;
}

Batch with_dummy_tail(Batch batch, std::int64_t tokens) {
  const std::int64_t missing = tokens - batch.size();
  if (missing <= 0) return batch;
  Batch::visit_token_columns([&](auto column, const std::optional<double>& dummy) {
    at::Tensor& values = batch.*column;
    if (!values.defined()) return;
    at::Tensor tail = dummy ? at::full({missing}, *dummy, values.options())
                            : at::arange(missing, values.options());
    if (values.dim() == 2) tail = tail.expand({values.size(0), missing});
    values = at::cat({values, tail}, -1);
  });
  batch.cu_seqlens_host.push_back(static_cast<std::int32_t>(tokens));
  batch.cu_seqlens = at::tensor(batch.cu_seqlens_host, at::kInt);
  batch.max_seqlen = std::max(batch.max_seqlen, missing);
  return batch;
}

Batch context_share(const Batch& whole, const ops::ContextPlan& plan) {
  Batch share;
  Batch::visit_token_columns([&](auto column, const auto&) {
    if ((whole.*column).defined()) share.*column = kept(whole.*column, plan);
  });
  share.cu_seqlens_host.push_back(0);
  for (const ops::Fragment& fragment : plan.fragments()) {
    share.cu_seqlens_host.push_back(static_cast<std::int32_t>(fragment.row + fragment.size()));
    share.max_seqlen = std::max(share.max_seqlen, fragment.size());
    const std::int64_t real =
        std::min(fragment.end, whole.real_tokens) - std::min(fragment.begin, whole.real_tokens);
    share.real_tokens += real;
    if (!holds_last_token(fragment, whole.real_sequences)) continue;
    share.last_tokens.push_back(fragment.row + fragment.size() - 1);
    Batch::visit_sequence_columns([&](auto column) {
      const auto& from = whole.*column;
      if (!from.empty())
        (share.*column).push_back(from[static_cast<std::size_t>(fragment.sequence)]);
    });
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
