#pragma once

#include <tuple>
#include <utility>

#include "ops/gradient_halves.h"
#include "ops/output_again.h"
#include "ops/registry.h"
#include "ops/sequences.h"

namespace heddle::ops {

struct Attention {
  static constexpr const char* kName = "attention";
  /// Heads of this rank.
  struct Dims {
    std::int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  };
  struct Inputs {
    at::Tensor q;     ///< [Tq,Hq,D]
    at::Tensor k, v;  ///< [Tk,Hkv,D]; query head h reads KV head h / (Hq/Hkv).
    Sequences q_sequences,
        k_sequences;   ///< Same count; equal in training. In sequence s, query i of m sees keys up
                       ///< to n - m + i of n (causal, aligned at the end).
    double scale = 0;  ///< 0 means D^-1/2.
  };
  struct Forward {
    at::Tensor o;
    std::vector<at::Tensor> saved;
  };
  struct Gradients {
    at::Tensor q, k, v;
  };
  struct Functions {
    Forward (*forward)(const Inputs&, bool keep);
    Gradients (*backward)(const Inputs&, const Forward&, const at::Tensor& grad_o);
  };
};

/// Causal softmax attention over packed sequences, softmax in fp32 or wider, memory linear in T. o
/// [Tq,Hq,D]. Differentiable in q, k, v.
at::Tensor attention(const KernelTable& kernels, const Attention::Inputs& inputs);

struct OutputGate {
  static constexpr const char* kName = "output_gate";
  using Dims = AnyDims;
  struct Functions {
    at::Tensor (*forward)(const at::Tensor& x, const at::Tensor& gate);
    /// Gradients of x and gate.
    std::pair<at::Tensor, at::Tensor> (*backward)(const at::Tensor& x, const at::Tensor& gate,
                                                  const at::Tensor& grad_y);
    /// Gradients and y again, in one pass; null: in two.
    std::tuple<at::Tensor, at::Tensor, at::Tensor> (*backward_again)(
        const at::Tensor& x, const at::Tensor& gate, const at::Tensor& grad_y) = nullptr;
    /// The gradient of the gate into the given memory, that of x besides; y, unless undefined,
    /// takes the output again. Null: it takes no memory.
    at::Tensor (*backward_into)(const at::Tensor& x, const at::Tensor& gate,
                                const at::Tensor& grad_y, const at::Tensor& grad_gate,
                                const at::Tensor& y) = nullptr;
  };
};

/// y = x * sigmoid(gate). x [T,n,D] contiguous; gate [T,n,D] with unit stride over D (a view into
/// the q projection). Differentiable. `halves`, unless null: those of which the gate is the second.
at::Tensor output_gate(const KernelTable& kernels, const at::Tensor& x, const at::Tensor& gate,
                       OutputAgain again = {},
                       const std::shared_ptr<GradientHalves>& halves = nullptr);

}  // namespace heddle::ops
