#pragma once

#include <span>

#include "data/batch.h"

namespace heddle::data {

/// The batches' tokens end to end, with all columns by token and by sequence: at least one batch,
/// all on the host and alike in their columns. A dummy tail is a real sequence of the result unless
/// it is the last batch's.
Batch joined(std::span<const Batch> batches);

}  // namespace heddle::data
