// Drawing one token of each row of logits: plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

struct SampleTokensArguments {
  Element type;  ///< Type of the logits.
  int batch = 0, vocabulary = 0;
  InputRows logits;
  const float* temperature = nullptr;  ///< [batch], as the others
  const double *top_p = nullptr, *min_p = nullptr;
  const int64_t *top_k = nullptr, *seeds = nullptr, *positions = nullptr;
  uint64_t stream_name = 0;  ///< Second half of the generator's counter.
  int64_t* ids = nullptr;
  double *logprobs = nullptr, *sampled_logprobs = nullptr;
  int support = 0;              ///< Columns of `supports`.
  int64_t* supports = nullptr;  ///< [batch,support], -1 where nothing is written.
  void* workspace = nullptr;
  // Numbers of a step that goes on by itself, see SampleTokens::Next; all null otherwise.
  int64_t* next_tokens = nullptr;
  int64_t* counts = nullptr;         ///< [counted,batch]
  int counted = 0;                   ///< Rows of `counts`.
  const int64_t* is_real = nullptr;  ///< [batch]
  double* told = nullptr;            ///< [2,batch,3], of the host.
};

/// Bytes of scratch that a call wants.
int64_t sample_tokens_workspace(int64_t batch, int64_t vocabulary);

void sample_tokens(const SampleTokensArguments& arguments, cudaStream_t stream);

}  // namespace heddle::ops::cuda
