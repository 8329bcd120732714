#pragma once

#include <cstdint>
#include <vector>

#include "data/batch.h"
#include "ops/context_parallel/plan.h"

namespace heddle::data {

/// The batch with a dummy tail up to `tokens`, if it is shorter, so that every rank along cp has
/// tokens of it. Host tensors.
Batch with_dummy_tail(Batch batch, std::int64_t tokens);

/// The real sequences of a batch, by number, whose last token the plan's rank keeps.
std::vector<std::int64_t> sequences_ending_here(const Batch& whole, const ops::ContextPlan& plan);

/// The tokens of a batch that the plan's rank keeps, with their positions, labels and loss weights;
/// cu_seqlens are those of its fragments, `last_tokens`, `row_ids`, `targets` and `text_of_row`
/// those of the sequences that end on the rank, and the sums are over what is here. Host tensors.
Batch context_share(const Batch& whole, const ops::ContextPlan& plan);

}  // namespace heddle::data
