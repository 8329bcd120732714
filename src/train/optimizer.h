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
#include "ops/optimizer_step/optimizer_step.h"
#include "ops/registry.h"
#include "train/state_offload.h"

namespace heddle::train {

/// AdamW or SGD over the trainable parameters, of each the rows that this rank owns; keeps their
/// moments and, for parameters below fp32, an fp32 master copy unless `optim.state_dtype` is
/// bfloat16, or int8 and the parameter a matrix whose rows are whole blocks of codes. With
/// `optim.offload` they live in the memory of the host.
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

  /// Numbers of later AdamW steps; exempt parameters stay without decay.
  void set_adamw(double beta1, double beta2, double eps, double weight_decay);

  // A step of which the host knows no number but those of upload_numbers(), so that it can be
  // recorded and replayed.
  /// False where the optimizer or its kernel keeps the host in between.
  bool can_queue(const ops::KernelTable& kernels) const;
  /// The numbers of the next queued step go to the device.
  void upload_numbers(double lr);
  /// Norm, clipping at `clip_norm` (0: none) and update; clears the gradients. Returns the norm,
  /// 0-d fp64 on the device. Changes nothing where it or `loss` (0-d, of all ranks) is not finite.
  at::Tensor queue_step(const ops::KernelTable& kernels, double clip_norm, const at::Tensor& loss);

  std::int64_t steps() const { return steps_; }
  /// How often weights began to change: a step that failed before may run again.
  std::int64_t updates() const { return updates_; }
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
    at::Tensor master, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, momentum;
    bool decays;
    double weight_decay;
    std::uint64_t rounding_key;
  };
  void add_moments(Slot& slot);
  std::vector<ops::AdamwTensor> adamw_tensors() const;
  ops::AdamwOptions adamw_options() const;

  std::vector<Slot> slots_;
  std::optional<StateOffload> offload_;
  config::OptimSection options_;
  comm::Group owners_;
  std::int64_t steps_ = 0, updates_ = 0;
  at::Tensor numbers_;  ///< Numbers of the step under way, see ops::AdamwOptions::on_device.
};

}  // namespace heddle::train
