// Attention of one new token in each of many sequences: plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

struct AttentionDecodeShape {
  int batch = 0, heads = 0, kv_heads = 0;
  int head_dim = 0;     ///< 64, 128 or 256.
  int page_tokens = 0;  ///< A power of two.
  int pages = 0;        ///< Columns of the table of pages.
  int64_t longest = 0;  ///< No sequence has more keys in the cache before this token.
};

/// bf16. Rows are those of the sequences; heads of head_dim elements follow each other.
struct AttentionDecodeInputs {
  InputRows q, k, v;  ///< Queries, keys and values of the new tokens.
  void *k_cache = nullptr,
       *v_cache = nullptr;           ///< [pages,page_tokens,kv_heads,head_dim], appended to.
  const int* pages = nullptr;        ///< [batch,pages]: those of each sequence.
  const int64_t* lengths = nullptr;  ///< [batch]
  float scale = 1;
};

/// Floats of scratch that a call wants.
int64_t attention_decode_workspace(const AttentionDecodeShape& shape);

/// o [batch,heads,head_dim] bf16.
void attention_decode(const AttentionDecodeShape& shape, const AttentionDecodeInputs& in, void* o,
                      float* workspace, cudaStream_t stream);

}  // namespace heddle::ops::cuda
