#pragma once

#include "ops/registry.h"
#include "ops/sequences.h"

namespace heddle::ops {

struct CausalConv1d {
  static constexpr const char* kName = "causal_conv1d";
  struct Dims {
    std::int64_t channels = 0, width = 4;
  };
  struct Inputs {
    at::Tensor x;              ///< [T,C]
    at::Tensor weight;         ///< [C,W], W <= 8
    at::Tensor initial_state;  ///< [S,C,W-1] the inputs before each sequence, oldest first;
                               ///< undefined: zero.
    Sequences sequences;
    bool want_final_state = false;
    /// Without it the backward may leave the weight's gradient undefined.
    bool wants_weight_gradient = true;
  };
  struct Gradients {
    at::Tensor x, weight, initial_state;
  };
  struct Functions {
    /// Returns y and the final state (undefined unless asked for). The backward recomputes the
    /// convolution.
    std::pair<at::Tensor, at::Tensor> (*forward)(const Inputs&);
    Gradients (*backward)(const Inputs&, const at::Tensor& grad_y,
                          const at::Tensor& grad_final_state);
  };
};

struct CausalConv1dResult {
  at::Tensor y;            ///< [T,C]
  at::Tensor final_state;  ///< [S,C,W-1], dtype of x.
};

/// y = silu(depthwise causal convolution of x), restarted at each sequence: y[t,c] = silu(sum_w
/// weight[c,w] x[t-W+1+w,c]) with the initial state, or zero, before the sequence. Differentiable
/// in x, weight, initial_state.
CausalConv1dResult causal_conv1d(const KernelTable& kernels, const CausalConv1d::Inputs& inputs);

}  // namespace heddle::ops
