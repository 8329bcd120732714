// Low-rank changes of a few rows, each of a set that a table on the device names: plain C++, no
// ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "ops/grouped_low_rank/cuda/slots.h"

namespace heddle::ops::cuda {

constexpr int kMostSlotLayers = 6;

/// Layers that share an input, and the sets of its rows.
struct SlotLayers {
  const SlotFactors* layers[kMostSlotLayers] = {};  ///< By slot.
  int count = 0;
  const SlotRun* runs = nullptr;
  int run_count = 0;
  /// Columns of the lows of each layer: a multiple of 16, no less than any rank. Lows are [rows,
  /// count * rank], bf16.
  int rank = 0;
};

/// scale x a^T of each run and layer, x [rows,depth] with 16-byte rows; layer i has `columns[i]`
/// columns. Columns of the lows beyond a rank, up to a multiple of 16, are zeros; others and rows
/// outside of the runs stay as they are. Brings b near for add_slot_outputs.
void slot_lows(const SlotLayers& slots, const void* x, int64_t x_stride, int depth, void* lows,
               const std::vector<int>& columns, cudaStream_t stream);

/// y [rows,columns], bf16, unit stride.
struct SlotOutput {
  void* y = nullptr;
  int64_t stride = 0;
  int columns = 0;
};

/// y += low b^T of each run and layer, a sum in fp32 and one rounding.
void add_slot_outputs(const SlotLayers& slots, const void* lows,
                      const std::vector<SlotOutput>& outputs, cudaStream_t stream);

/// silu(gate + its change) * (up + its change) of two layers, whose outputs lie alike, for the rows
/// of all runs, those of no slot too; `gated` lies like them. Both are rounded to bf16 first.
void gated_slot_outputs(const SlotLayers& slots, const void* lows, const SlotOutput& gate,
                        const SlotOutput& up, void* gated, cudaStream_t stream);

/// A stream of this thread that begins where `stream` is, beside which it runs until join().
class SideStream {
 public:
  /// The one of the current device.
  static SideStream& current();
  cudaStream_t fork(cudaStream_t stream);
  /// Later work of `stream` comes after all of the side stream's since fork(). Nothing without one.
  void join(cudaStream_t stream);

 private:
  cudaStream_t side_ = nullptr;
  cudaEvent_t begun_ = nullptr, done_ = nullptr;
  bool is_forked_ = false;
};

}  // namespace heddle::ops::cuda
