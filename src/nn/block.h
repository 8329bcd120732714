#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/group.h"
#include "nn/parameter.h"
#include "ops/registry.h"
#include "ops/sequences.h"

namespace heddle::ops {
struct ContextParallel;
}

namespace heddle::nn {

/// What every block of one forward pass is given besides its hidden states.
struct BlockInputs {
  const ops::KernelTable* kernels = nullptr;
  ops::Sequences sequences;
  at::Tensor cos, sin;  ///< [T, rotary/2] of all rows, see ops::rotary_tables.
  /// The ranks that share each block's heads and widths, and outside of them the rows of hidden
  /// states, T/tp each in order; null if this rank has all.
  const comm::Group* tensor_group = nullptr;
  /// The ranks that share the batch's tokens, whose fragments here `sequences` are; null if this
  /// rank has all.
  std::shared_ptr<const ops::ContextParallel> context;
  std::int64_t real_tokens = 0;  ///< Tokens before the dummy tail.
  bool training = false;         ///< Dropout and auxiliary losses are on.
  /// Results of elementwise operators and norms that only feed a product are not kept for its
  /// backward but made again there.
  bool recompute_elementwise = false;
  /// Only the gradients of the stage are wanted: what makes its output and nothing else may be left
  /// out.
  bool output_unused = false;
  /// The ranks that share the routed experts; null if this rank has all.
  const comm::Group* expert_group = nullptr;
  /// [T/tp,k]: the experts of each token of this rank's rows, which the router takes instead of its
  /// top k (router replay).
  at::Tensor experts;
  /// Auxiliary losses pool all layers: blocks hand out their load instead of a loss.
  bool pooled_auxiliary_loss = false;
};

struct BlockOutput {
  at::Tensor hidden;  ///< [T/tp,H]
  /// 0-d sum over tokens; undefined if the stage has none. Pooled: [E] sums of the router's
  /// probabilities, of which the loss is made when all layers are known.
  at::Tensor auxiliary_loss;
  at::Tensor expert_assignments;  ///< Pooled: [E] how often each expert was chosen.
  at::Tensor experts;             ///< [T/tp,k] int64: the experts of each token, if routed.
};

/// One decoder layer: the unit of memory, sharding and recomputation (docs/design.md 3.5). It runs
/// in stages, each an autograd island from hidden states to hidden states.
class Block {
 public:
  virtual ~Block() = default;
  virtual std::size_t stages() const = 0;
  /// `stage` 0 is the mixer, 1 the MLP. hidden [T/tp,H]; `inputs` describe all T tokens.
  virtual BlockOutput forward(std::size_t stage, const at::Tensor& hidden,
                              const BlockInputs& inputs) = 0;
  virtual void visit_parameters(const std::function<void(Parameter&)>& visit) = 0;
};

}  // namespace heddle::nn
