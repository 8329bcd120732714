#pragma once

#include <cstdint>
#include <vector>

#include "data/batch.h"
#include "ops/context_parallel/plan.h"

namespace heddle::data {

/// The batch with a dummy tail up to `tokens`, if it is shorter, so that every rank along cp has
/// tokens of it. Host tensors.
Batch with_dummy_tail(Batch batch, std::int64_t tokens);

/// The real sequences of a batch, its first `sequences`, whose last token the plan's rank keeps
/// of.
std::vector<std::int64_t> sequences_ending_here(std::int64_t sequences,
                                                const ops::ContextPlan& plan);

/// The real sequence of a batch, by number, that each token belongs to which the plan's rank keeps;
/// whole.real_sequences and more for dummy ones.
std::vector<std::int64_t> sequences_of_tokens(const ops::ContextPlan& plan);

/// The tokens of a batch that the plan's rank keeps, with all columns by token; cu_seqlens are
/// those of its fragments, `last_tokens` and the columns by sequence those of the sequences that
/// end on the rank, and the sums are over what is here. Host tensors.
Batch context_share(const Batch& whole, const ops::ContextPlan& plan);

}  // namespace heddle::data
