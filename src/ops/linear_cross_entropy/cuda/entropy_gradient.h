// CUDA kernel of the language-model head: gradients of losses that hold an entropy, from a chunk of
// logits. Plain C++ header.
#pragma once

#include "ops/linear_cross_entropy/cuda/softmax_gradient.h"

namespace heddle::ops::cuda {

/// Statistics that softmax_gradient() found without a gradient, and a loss's derivatives; all
/// [rows], every row with a label.
struct EntropyGradientRows {
  const int64_t* labels = nullptr;
  const float *logprobs = nullptr, *entropies = nullptr;
  const float* factors = nullptr;            ///< d loss / d -logprob
  const float* entropy_gradients = nullptr;  ///< d loss / d entropy
};

/// Turns logits, in place, into the gradient by them:
/// factor (p - one_hot(label)) - entropy_gradient p (log p + entropy). Arithmetic in fp32; each
/// logit is read and written once.
void entropy_gradient(const SoftmaxGradientShape& shape, void* logits,
                      const EntropyGradientRows& rows, cudaStream_t stream);

}  // namespace heddle::ops::cuda
