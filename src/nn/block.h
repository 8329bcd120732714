#pragma once

#include <cstddef>
#include <functional>

#include <ATen/core/Tensor.h>

#include "nn/parameter.h"
#include "nn/pass.h"

namespace heddle::nn {

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
  /// `stage` 0 is the mixer, 1 the MLP. hidden [T/tp,H]; `pass` describes all T tokens.
  virtual BlockOutput forward(std::size_t stage, const at::Tensor& hidden, const Pass& pass) = 0;
  virtual void visit_parameters(const std::function<void(Parameter&)>& visit) = 0;
};

}  // namespace heddle::nn
