#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ops/context_parallel/method.h"
#include "ops/sequences.h"

namespace heddle::ops {

/// A run of tokens of one sequence inside one segment.
struct Fragment {
  std::int64_t sequence;    ///< Its number in the batch.
  std::int64_t begin, end;  ///< On the batch's token axis.
  std::int64_t row;         ///< Row of `begin` among the rank's tokens.
  std::int64_t segment;
  bool enters, leaves;  ///< Its sequence begins before the segment, or goes on after it.

  std::int64_t size() const { return end - begin; }
};

/// How the T tokens of a packed batch are divided over the ranks along cp, known to all of them.
/// The token axis is cut into segments of equal length (within one), wherever sequences end. For
/// kState there are two per rank, the r-th from the front and from the back, which gives causal
/// attention equal work ("zig-zag"); for kUlysses one.
class ContextPlan {
 public:
  /// cu_seqlens [S+1] of the batch. TORCH_CHECKs that there is a token for every segment.
  ContextPlan(ContextMethod method, std::vector<std::int32_t> cu_seqlens, std::int64_t ranks,
              std::int64_t rank);
  static std::int64_t segments_of(ContextMethod method, std::int64_t ranks) {
    return method == ContextMethod::kState ? 2 * ranks : ranks;
  }

  ContextMethod method() const { return method_; }
  std::int64_t ranks() const { return ranks_; }
  std::int64_t rank() const { return rank_; }
  const std::vector<std::int32_t>& cu_seqlens() const { return cu_seqlens_; }

  std::int64_t segments() const { return static_cast<std::int64_t>(bounds_.size()) - 1; }
  std::int64_t begin(std::int64_t segment) const { return bounds_[segment]; }
  std::int64_t end(std::int64_t segment) const { return bounds_[segment + 1]; }
  /// Segments of a rank, first to last; every rank has as many.
  std::vector<std::int64_t> held(std::int64_t rank) const;
  std::int64_t held_per_rank() const { return segments() / ranks_; }
  /// Place of a segment when the ranks' segments are gathered: rank * held_per_rank() + slot.
  std::int64_t gathered_place(std::int64_t segment) const;
  std::int64_t tokens(std::int64_t rank) const;
  std::int64_t most_tokens() const;  ///< Tokens of the fullest rank.
  /// Where a token is: rank * stride + row among that rank's tokens.
  std::int64_t gathered_row(std::int64_t token, std::int64_t stride) const;
  std::int64_t segment_of(std::int64_t token) const;
  std::int64_t sequence_of(std::int64_t token) const;
  /// First token of the sequence that this token belongs to.
  std::int64_t sequence_begin(std::int64_t token) const { return cu_seqlens_[sequence_of(token)]; }

  /// True if a sequence goes on from this segment into the next.
  bool leaves(std::int64_t segment) const;
  bool enters(std::int64_t segment) const { return segment > 0 && leaves(segment - 1); }
  /// True if the segment is the middle of one sequence.
  bool is_passed_through(std::int64_t segment) const;
  bool any_leaves() const;
  bool any_is_passed_through() const;

  /// Fragments of this rank, in the order of its tokens.
  const std::vector<Fragment>& fragments() const { return fragments_; }
  /// They as sequences.
  Sequences fragment_sequences(c10::Device device) const;

 private:
  ContextMethod method_;
  std::vector<std::int32_t> cu_seqlens_;
  std::int64_t ranks_, rank_;
  std::vector<std::int64_t> bounds_;
  std::vector<Fragment> fragments_;
};

}  // namespace heddle::ops
