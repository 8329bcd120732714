// CUDA kernels of the gates of the gated delta rule. Plain C++ header.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// a, b [tokens, heads] of `type`; a_log, dt_bias [heads] of parameter_type; heads <= 1024.
struct GdnGatesShape {
  Element type = Element::kBFloat16;
  Element a_log_type = Element::kBFloat16;
  Element dt_bias_type = Element::kBFloat16;
  int64_t tokens = 0, heads = 0;
};

constexpr int64_t kGdnGatesMostHeads = 1024;

/// g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b): fp32 [tokens, heads]. Bytes per token
/// and head: 2 x element + 8.
void gdn_gates_forward(const GdnGatesShape& shape, const InputRows& a, const InputRows& b,
                       const void* a_log, const void* dt_bias, float* g, float* beta,
                       cudaStream_t stream);

/// Floats of scratch that the backward needs.
int64_t gdn_gates_backward_workspace(const GdnGatesShape& shape);

/// Either of grad_g and grad_beta (fp32 [tokens, heads], contiguous) may be null; grad_a,
/// grad_a_log and grad_dt_bias are written with grad_g (and null without), grad_b with grad_beta.
/// The gradients of the parameters may be null in any case.
/// Bytes per token and head: 4 x element + 16.
void gdn_gates_backward(const GdnGatesShape& shape, const InputRows& a, const void* a_log,
                        const void* dt_bias, const float* g, const float* beta, const float* grad_g,
                        const float* grad_beta, void* grad_a, void* grad_b, void* grad_a_log,
                        void* grad_dt_bias, float* workspace, cudaStream_t stream);

}  // namespace heddle::ops::cuda
