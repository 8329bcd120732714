#include "ops/context_parallel/plan.h"

#include <algorithm>
#include <utility>

namespace heddle::ops {

ContextPlan::ContextPlan(ContextMethod method, std::vector<std::int32_t> cu_seqlens,
                         std::int64_t ranks, std::int64_t rank)
    : method_(method), cu_seqlens_(std::move(cu_seqlens)), ranks_(ranks), rank_(rank) {
  const std::int64_t count = segments_of(method, ranks), total = cu_seqlens_.back();
  TORCH_CHECK(total >= count, "context parallelism: ", total, " tokens for ", count, " segments");
  for (std::int64_t j = 0; j <= count; ++j) bounds_.push_back(j * total / count);
  std::int64_t row = 0;
  for (const std::int64_t segment : held(rank)) {
    for (std::int64_t at = begin(segment); at < end(segment);) {
      const std::int64_t sequence = sequence_of(at);
      const std::int64_t stop = std::min<std::int64_t>(cu_seqlens_[sequence + 1], end(segment));
      fragments_.push_back({sequence, at, stop, row, segment, at > cu_seqlens_[sequence],
                            stop < cu_seqlens_[sequence + 1]});
      row += stop - at;
      at = stop;
    }
  }
}

std::vector<std::int64_t> ContextPlan::held(std::int64_t rank) const {
  if (method_ == ContextMethod::kUlysses) return {rank};
  return {rank, 2 * ranks_ - 1 - rank};
}

std::int64_t ContextPlan::gathered_place(std::int64_t segment) const {
  if (method_ == ContextMethod::kUlysses) return segment;
  return segment < ranks_ ? 2 * segment : 2 * (2 * ranks_ - 1 - segment) + 1;
}

std::int64_t ContextPlan::tokens(std::int64_t rank) const {
  std::int64_t sum = 0;
  for (const std::int64_t segment : held(rank)) sum += end(segment) - begin(segment);
  return sum;
}

std::int64_t ContextPlan::most_tokens() const {
  std::int64_t most = 0;
  for (std::int64_t rank = 0; rank < ranks_; ++rank) most = std::max(most, tokens(rank));
  return most;
}

std::int64_t ContextPlan::gathered_row(std::int64_t token, std::int64_t stride) const {
  const std::int64_t segment = segment_of(token);
  const std::int64_t place = gathered_place(segment), rank = place / held_per_rank();
  std::int64_t row = token - begin(segment);
  for (const std::int64_t earlier : held(rank)) {
    if (earlier == segment) break;
    row += end(earlier) - begin(earlier);
  }
  return rank * stride + row;
}

std::int64_t ContextPlan::segment_of(std::int64_t token) const {
  return std::upper_bound(bounds_.begin(), bounds_.end(), token) - bounds_.begin() - 1;
}

std::int64_t ContextPlan::sequence_of(std::int64_t token) const {
  return std::upper_bound(cu_seqlens_.begin(), cu_seqlens_.end(), token) - cu_seqlens_.begin() - 1;
}

bool ContextPlan::leaves(std::int64_t segment) const {
  if (segment + 1 >= segments()) return false;
  return sequence_begin(end(segment)) < end(segment);
}

bool ContextPlan::is_passed_through(std::int64_t segment) const {
  return enters(segment) && leaves(segment) &&
         sequence_of(begin(segment)) == sequence_of(end(segment));
}

bool ContextPlan::any_leaves() const {
  for (std::int64_t j = 0; j < segments(); ++j) {
    if (leaves(j)) return true;
  }
  return false;
}

bool ContextPlan::any_is_passed_through() const {
  for (std::int64_t j = 0; j < segments(); ++j) {
    if (is_passed_through(j)) return true;
  }
  return false;
}

Sequences ContextPlan::fragment_sequences(c10::Device device) const {
  std::vector<std::int32_t> boundaries = {0};
  for (const Fragment& fragment : fragments_)
    boundaries.push_back(static_cast<std::int32_t>(fragment.row + fragment.size()));
  return Sequences::from_host(std::move(boundaries), device);
}

}  // namespace heddle::ops
