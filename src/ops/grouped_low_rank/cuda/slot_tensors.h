#pragma once

#include "ops/grouped_low_rank/cuda/slot_products.h"
#include "ops/grouped_low_rank/grouped_low_rank.h"

namespace heddle::ops::grouped_low_rank_cuda {

/// The tables of slots by their addresses; the tensors live on.
cuda::SlotLayers slot_layers(const LowRankSlots& slots);
at::Tensor empty_slot_lows(const at::Tensor& x, const LowRankSlots& slots);

at::Tensor slot_lows(const at::Tensor& x, const LowRankSlots& slots);
at::Tensor gated_slot_outputs(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& lows,
                              const LowRankSlots& slots);
void add_slot_outputs(const Tensors& outputs, const at::Tensor& lows, const LowRankSlots& slots);

}  // namespace heddle::ops::grouped_low_rank_cuda
