// Kernels between the products of experts: rows to their experts, SwiGLU with the weights
// of the assignments, rows back to their tokens. bf16, arithmetic in fp32, no atomics. Plain C++,
// no ATen. N of T x k assignments are to an expert; `source` [N] names the assignment t * k + j at
// each sorted place, `place` [T x k] is its inverse, N or more for those to none. Tensors are
// contiguous, begin on 16 bytes, and widths are multiples of 8.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// rows [N,width]: row n is that of token source[n] / k of x [T,width].
void gather_expert_rows(int64_t count, int64_t width, int64_t k, const void* x,
                        const int64_t* source, void* rows, cudaStream_t stream);

/// gather_expert_rows, each token read once and sent to its places below `count`: faster, for
/// the widths of can_send_rows.
void send_expert_rows(int64_t count, int64_t tokens, int64_t width, int64_t k, const void* x,
                      const int64_t* place, void* rows, cudaStream_t stream);
/// Whether the current device has bulk copies and some rows fit its shared memory.
bool can_send_rows(int64_t width);

/// y [T,width]: the sum over j < k of the rows place[t * k + j] below `count`, in the order of j,
/// and of `start` [T,width] unless it is null; rounded once.
void sum_expert_rows(int64_t count, int64_t tokens, int64_t width, int64_t k, const void* rows,
                     const int64_t* place, const void* start, void* y, cudaStream_t stream);

/// hidden [N,width]: weights[source[n]] * silu(gate) * up of gate_up [N, 2 width], gate first.
void weighted_swiglu_forward(int64_t count, int64_t width, const void* gate_up, const void* weights,
                             const int64_t* source, void* hidden, cudaStream_t stream);

/// From the gradient of hidden: those of gate_up and, at their assignments, of the weights [T x k].
/// `grad_hidden` is as if the weights were 1: what came before the product with them. Also makes
/// hidden anew, unless it is null.
void weighted_swiglu_backward(int64_t count, int64_t width, const void* gate_up,
                              const void* grad_hidden, const void* weights, const int64_t* source,
                              void* grad_gate_up, void* hidden, void* grad_weights,
                              cudaStream_t stream);

}  // namespace heddle::ops::cuda
