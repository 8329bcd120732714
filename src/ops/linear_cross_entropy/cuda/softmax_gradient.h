// CUDA kernel of the language-model head: cross-entropy and its gradient from a chunk of logits.
// Plain C++ header.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// logits [rows, vocabulary] of `type`, contiguous.
struct SoftmaxGradientShape {
  Element type = Element::kBFloat16;
  int64_t rows = 0, vocabulary = 0;
};

/// Inputs and outputs of the kernel besides the logits. labels int64 [rows]; a negative one is
/// ignored: its gradient, log-probability and entropy are 0. loss_weights fp32 [rows] or null (1).
struct SoftmaxGradientRows {
  const int64_t* labels = nullptr;
  const float* loss_weights = nullptr;
  float gradient_scale = 1;
  float* logprobs = nullptr;   ///< fp32 [rows]: log p(label); NaN where the label is no row of the
                               ///< vocabulary.
  float* entropies = nullptr;  ///< fp32 [rows], in nats; null: not wanted.
  bool want_gradient = false;
};

/// logprobs and entropies of every row; with want_gradient the logits become, in place, the
/// gradient of gradient_scale x the weighted sum of cross-entropies: gradient_scale * weight *
/// (softmax - one_hot(label)). Arithmetic in fp32. Bytes per logit: its size, twice that with the
/// gradient (more where a row has more than 262,144 logits or is no multiple of 16 bytes).
void softmax_gradient(const SoftmaxGradientShape& shape, void* logits,
                      const SoftmaxGradientRows& rows, cudaStream_t stream);

}  // namespace heddle::ops::cuda
