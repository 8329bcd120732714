#pragma once

#include "ops/cpu_dispatch.h"

namespace heddle::ops {

/// Rows of queries and of keys that are multiplied at once: scores of one pair of blocks are 16 kB
/// in fp32, and with the two operands they fit the second cache for heads of up to 256.
constexpr long kAttentionBlock = 64;

/// Elements of a padded head: whole vectors of every instruction set.
constexpr long attention_padded_dim(long dim) { return (dim + 15) / 16 * 16; }

/// One head of one sequence. C is float (double for double); padded = attention_padded_dim(dim).
/// Strides in elements between tokens. Packed keys and values are blocks of kAttentionBlock tokens,
/// zero beyond the sequence and beyond dim: `rows` as [tokens,padded], `columns` as
/// [padded,kAttentionBlock] per block.
struct AttentionHead {
  long queries = 0, keys = 0, dim = 0, padded = 0;
  double scale = 0;
  const void *q = nullptr, *o = nullptr, *grad_o = nullptr;  // T
  long q_stride = 0, o_stride = 0;                           // o_stride: of o, grad_o, grad_q
  void* out = nullptr;                                       // T, forward: o
  void* grad_q = nullptr;                                    // T
  void* lse = nullptr;                                       // C
  long lse_stride = 0;
  const void *key_rows = nullptr, *key_columns = nullptr;      // C
  const void *value_rows = nullptr, *value_columns = nullptr;  // C
  void *grad_k = nullptr, *grad_v = nullptr;  // C [key blocks * kAttentionBlock,padded], written
  void* scratch = nullptr;                    // C
};

/// One new token of a sequence, for the query heads of one KV head.
struct AttentionStep {
  const void* q = nullptr;                ///< [group,dim]
  const void *k = nullptr, *v = nullptr;  ///< Place 0 of the caches, tokens at `stride`.
  long stride = 0;
  const int* pages = nullptr;  ///< Pages of the sequence, see CacheRows.
  long page_tokens = 0;
  long keys = 0, group = 0, dim = 0;
  double scale = 0;
  void* out = nullptr;      ///< [group,dim]
  void* scratch = nullptr;  ///< group * (keys + padded) elements of C.
};

struct AttentionKernels {
  /// Packs [tokens,dim] of T into the blocks; either destination may be null.
  void (*pack)(const void* x, long stride, long tokens, long dim, void* rows, void* columns);
  /// Queries [begin, end), end - begin <= kAttentionBlock. Scratch: forward_scratch elements of C.
  void (*forward)(const AttentionHead&, long begin, long end);
  /// The whole head. Scratch: backward_scratch elements of C.
  void (*backward)(const AttentionHead&);
  /// One query per head of a group.
  void (*step)(const AttentionStep&);
};

constexpr long attention_forward_scratch(long padded) {
  return 2 * kAttentionBlock * padded + kAttentionBlock * (kAttentionBlock + 2);
}
constexpr long attention_backward_scratch(long queries, long padded) {
  const long rows = queries + kAttentionBlock;
  return 3 * rows * padded + rows + 2 * kAttentionBlock * kAttentionBlock;
}

HEDDLE_CPU_DECLARE(AttentionKernels attention_kernels(int element))

}  // namespace heddle::ops
