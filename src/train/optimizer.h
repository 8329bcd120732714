#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ckpt/training_checkpoint.h"
#include "comm/group.h"
#include "config/run_config.h"
#include "nn/parameter.h"
#include "ops/registry.h"
#include "train/state_offload.h"

namespace heddle::train {

/// AdamW or SGD over the trainable parameters, of each the rows that this rank owns; keeps their
/// moments and, for parameters below fp32, an fp32 master copy unless `optim.state_dtype` is
/// bfloat16. With `optim.offload` they live in the memory of the host.
class Optimizer {
 public:
  /// Parameters with one dimension, and those that match `optim.no_decay`, get no weight decay.
  /// `seed` keys stochastic rounding. `owners`: the ranks over which the rows are divided.
  Optimizer(std::vector<nn::Parameter*> parameters, const config::OptimSection& options,
            std::uint64_t seed, comm::Group owners = comm::Group("alone"));

  /// sqrt of the sum of squares of all gradients, after the division by the global loss weight.
  double gradient_norm() const;
  /// One update with gradients multiplied by `gradient_multiplier`; clears the gradients. A
  /// parameter without gradient in this step is updated as with a zero one.
  void step(const ops::KernelTable& kernels, double lr, double gradient_multiplier);

  std::int64_t steps() const { return steps_; }
  /// Names of the parameters that get no weight decay.
  std::vector<std::string> undecayed() const;
  std::int64_t state_bytes() const;

  /// "weights/NAME", "exp_avg/NAME", ...: everything that changes in training, as live tensors of
  /// this rank. `with_copies`: also of parameters that another rank along tp holds and saves.
  std::vector<ckpt::TensorPart> state(bool with_copies) const;
  void set_steps(std::int64_t steps) { steps_ = steps; }

 private:
  struct Slot {
    nn::Parameter* parameter;
    at::Tensor owned;  ///< Its rows that this rank updates.
    at::Tensor master, exp_avg, exp_avg_sq, momentum;
    double weight_decay;
    std::uint64_t rounding_key;
  };
  std::vector<Slot> slots_;
  std::optional<StateOffload> offload_;
  config::OptimSection options_;
  comm::Group owners_;
  std::int64_t steps_ = 0;
};

}  // namespace heddle::train
