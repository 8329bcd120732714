// Where packed sequences lie, as cuDNN's ragged graphs want to be told. Plain C++, no ATen.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace heddle::ops::cuda {

/// Rows of the table: lengths of the queries and keys of each sequence, then where its rows begin.
enum class RaggedRow { kQueries, kKeys, kQ, kK, kV, kKeyGradients, kLogSumExp, kCount };

struct RaggedLayoutShape {
  int64_t sequences;  ///< Number of sequences in cu_seqlens.
  int64_t batch;      ///< Sequences of the graph, at least `sequences`: the rest is empty.
  /// Elements from token to token of each tensor; the last counts those of the log-sum-exp.
  int64_t q_stride, k_stride, v_stride, key_gradient_stride, log_sum_exp_stride;
};

/// Elements from row to row of the table: rows begin on 16 bytes and have one more entry than the
/// batch.
inline int64_t ragged_row_length(int64_t batch) { return (batch + 4) / 4 * 4; }

/// Fills table [RaggedRow::kCount, ragged_row_length(batch)] from cu_q, cu_k [sequences + 1], all
/// on the device. Sequences come in falling order of their work, so that the longest are not begun
/// last. Offsets must fit 32 bits.
void ragged_layout(const RaggedLayoutShape& shape, const int32_t* cu_q, const int32_t* cu_k,
                   int32_t* table, cudaStream_t stream);

}  // namespace heddle::ops::cuda
