#include "data/joined_batch.h"

#include <algorithm>
#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

namespace heddle::data {

Batch joined(std::span<const Batch> batches) {
  TORCH_CHECK(!batches.empty(), "no batch to join");
  if (batches.size() == 1) return batches[0];
  Batch whole;
  Batch::visit_token_columns([&](auto column, const auto&) {
    std::vector<at::Tensor> parts;
    for (const Batch& batch : batches) {
      if ((batch.*column).defined()) parts.push_back(batch.*column);
    }
    TORCH_CHECK(parts.empty() || parts.size() == batches.size(),
                "batches with and without a column are not joined");
    if (!parts.empty()) whole.*column = at::cat(parts, -1);
  });
  whole.cu_seqlens_host = {0};
  std::int64_t first = 0;
  for (const Batch& batch : batches) {
    for (std::size_t s = 1; s < batch.cu_seqlens_host.size(); ++s)
      whole.cu_seqlens_host.push_back(static_cast<std::int32_t>(first + batch.cu_seqlens_host[s]));
    Batch::visit_sequence_columns([&](auto column) {
      (whole.*column).insert((whole.*column).end(), (batch.*column).begin(), (batch.*column).end());
    });
    for (const std::int64_t last : batch.last_tokens) whole.last_tokens.push_back(first + last);
    whole.max_seqlen = std::max(whole.max_seqlen, batch.max_seqlen);
    whole.loss_rows += batch.loss_rows;
    whole.loss_weight_sum += batch.loss_weight_sum;
    whole.real_tokens = first + batch.real_tokens;
    whole.real_sequences += batch.real_sequences;
    first += batch.size();
  }
  whole.cu_seqlens = at::tensor(whole.cu_seqlens_host, at::kInt);
  return whole;
}

}  // namespace heddle::data
