// The backward of causal attention over packed sequences at head dimension 256, for sm_90a. Plain
// C++, no ATen. The design: README.md of the operator.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace heddle::ops::cuda {

constexpr int64_t kPackedBackwardDim = 256;
constexpr int64_t kPackedBackwardRows = 64;  ///< Queries, and keys, of a tile.

struct PackedBackwardShape {
  int64_t tokens, sequences, q_heads, k_heads;
  int64_t k_stride, v_stride;  ///< Elements from token to token; multiples of 8.
  double scale;                ///< Factor of the scores.

  /// Tiles, and pairs of tiles, of all sequences at most, whatever their lengths.
  int64_t tiles() const { return tokens / kPackedBackwardRows + sequences; }
  int64_t pairs() const { return tokens / (2 * kPackedBackwardRows) + sequences; }
  int64_t delta_floats() const { return tokens * q_heads; }
  int64_t work_ints() const { return 2 * (tiles() + pairs()); }
};

/// bf16 tensors q, o, d_o, dq [tokens,q_heads,256], dk, dv [tokens,k_heads,256] contiguous; k, v
/// the same but for their token stride. lse [tokens,q_heads]: the natural log-sum-exp of the
/// scores. cu_seqlens [sequences + 1]; what lies in one sequence never reaches the gradients of
/// another.
struct PackedBackwardTensors {
  const void *q, *k, *v, *o, *d_o;
  const float* lse;
  const int32_t* cu_seqlens;
  void *dq, *dk, *dv;
  float* delta;   ///< Scratch of delta_floats().
  int32_t* work;  ///< Scratch of work_ints().
};

/// Writes all of dq, dk and dv of the tokens below cu_seqlens[sequences], the same bits on every
/// run. Reads nothing on the host and launches the same grid for any lengths. Wants has_sm90a().
/// Throws std::runtime_error.
void packed_backward(const PackedBackwardShape& shape, const PackedBackwardTensors& tensors,
                     cudaStream_t stream);

}  // namespace heddle::ops::cuda
