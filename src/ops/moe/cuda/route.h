// The router of a layer of experts: a warp has a token, its probabilities stay in registers. fp32,
// ties go to the lower index, no atomics. Plain C++, no ATen. Tensors are contiguous.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

inline constexpr int64_t kMostRoutedExperts = 1024;
inline constexpr int64_t kMostChosenExperts = 32;

struct Router {
  int64_t tokens, experts, top_k;
  bool normalize;
  Element type;  ///< Type of logits, weights and their gradients.
};

/// From logits [tokens,experts]: probabilities [tokens,experts] fp32, the k largest of each token
/// (or those of `chosen`, if not null) [tokens,k] int64, and their weights [tokens,k]. Throws
/// std::invalid_argument for more experts or a larger k than it takes.
void route_forward(const Router& router, const void* logits, const int64_t* chosen,
                   float* probabilities, int64_t* experts, void* weights, cudaStream_t stream);

/// The gradient of the logits from those of weights and probabilities, either of which may be null.
void route_backward(const Router& router, const float* probabilities, const int64_t* experts,
                    const void* grad_weights, const float* grad_probabilities, void* grad_logits,
                    cudaStream_t stream);

}  // namespace heddle::ops::cuda
