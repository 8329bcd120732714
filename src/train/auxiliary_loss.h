#pragma once

#include <cstdint>
#include <utility>

#include <ATen/core/Tensor.h>

#include "models/config.h"
#include "parallel/block_runner.h"

namespace heddle::train {

/// Layers that have experts.
std::int64_t sparse_layers(const models::Config& model);

/// train.router_aux_loss hf: the load-balancing loss E * sum_e f_e P_e of transformers
/// (load_balancing_loss_func), f_e and P_e being means over all sparse layers and all tokens of the
/// micro-batches that the ranks have at the time. The layers' sums go forward with the hidden
/// states, from one stage of a pipeline to the next; after the last layer the loss is known, and
/// how it depends on each layer's probabilities goes back with the gradients.
class PooledBalance {
 public:
  /// `experts`: E. `peers`: the ranks that run the same layers for other tokens; all of them call
  /// close() together.
  PooledBalance(std::int64_t experts, comm::Group peers)
      : experts_(experts), peers_(std::move(peers)) {}

  std::int64_t sums_size() const { return 2 * experts_ + 1; }
  std::int64_t gradient_size() const { return experts_; }
  /// [2E+1] of the layers of `pass` and those before, whose sums are `before` (undefined: none):
  /// assignments and probabilities by expert, tokens x layers. `tokens`: of this rank.
  at::Tensor sums(const parallel::BlockRunner::Tape& tape, std::int64_t tokens,
                  const at::Tensor& before, at::TensorOptions options) const;
  struct Closed {
    at::Tensor gradient;  ///< [E], BlockRunner::Tape::auxiliary_gradient of every layer.
    /// 0-d, this rank's part of the loss times the rows of all: the additive form of the other
    /// mode.
    at::Tensor loss;
  };
  Closed close(const at::Tensor& sums) const;

 private:
  std::int64_t experts_;
  comm::Group peers_;
};

}  // namespace heddle::train
