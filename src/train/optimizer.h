#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ckpt/training_checkpoint.h"
#include "comm/group.h"
#include "comm/mesh.h"
#include "config/run_config.h"
#include "nn/parameter.h"
#include "ops/optimizer_step/optimizer_step.h"
#include "ops/registry.h"
#include "train/parameter_groups.h"
#include "train/state_offload.h"

namespace heddle::train {

/// AdamW, SGD or Muon over the trainable parameters, of each the rows that this rank owns; keeps
/// their moments and, for parameters below fp32, an fp32 master copy unless `optim.state_dtype` is
/// bfloat16, or int8 and the parameter a matrix whose rows are whole blocks of codes. With
/// `optim.offload` they live in the memory of the host.
class Optimizer {
 public:
  struct Ranks {
    comm::Group owners = comm::Group("alone");  ///< The rows are divided over these.
    /// The ones of them that hold the same parameters, a pipeline stage: Muon needs whole
    /// matrices.
    comm::Group stage = comm::Group("alone");
    /// The ranks of a mesh.
    static Ranks of(const comm::Mesh& mesh);
  };
  /// Parameters with one dimension, and those that match `optim.no_decay`, get no weight decay.
  /// `seed` keys stochastic rounding.
  Optimizer(std::vector<nn::Parameter*> parameters, const config::OptimSection& options,
            std::uint64_t seed, Ranks ranks, const LearningRates& rates = {});
  /// On one rank, with one learning rate.
  Optimizer(std::vector<nn::Parameter*> parameters, const config::OptimSection& options,
            std::uint64_t seed);

  /// sqrt of the sum of squares of all gradients, after the division by the global loss weight.
  double gradient_norm() const;
  /// One update with gradients multiplied by `gradient_multiplier`; clears the gradients. A
  /// parameter without gradient in this step is updated as with a zero one.
  void step(const ops::KernelTable& kernels, double lr, double gradient_multiplier);

  /// Counts a step that changes nothing, and clears the gradients.
  void skip_step();
  void clear_gradients();

  // Several optimizers together: the numbers and bits of each by itself, in launches that they
  // share where the kernels have such.
  /// gradient_norm() of each, queued now: what it returns waits for them.
  static std::function<std::vector<double>()> queued_gradient_norms(
      const std::vector<const Optimizer*>& optimizers);
  struct Update {
    Optimizer* optimizer;
    double lr;
  };
  /// step() of each by its `multipliers`, which are asked for when all else is prepared; one that
  /// is NaN only clears the gradients. No optimizer twice.
  static void step_together(const ops::KernelTable& kernels, std::span<const Update> updates,
                            const ops::LateMultipliers& multipliers);

  /// Numbers of later AdamW steps; exempt parameters stay without decay.
  void set_adamw(double beta1, double beta2, double eps, double weight_decay);

  // A step of which the host knows no number but those of upload_numbers(), so that it can be
  // recorded and replayed.
  /// False where the optimizer or its kernel keeps the host in between.
  bool can_queue(const ops::KernelTable& kernels) const;
  /// The numbers of the next queued step go to the device.
  void upload_numbers(double lr);
  /// Norm, clipping at `clip_norm` (0: none) and update; clears the gradients. Returns the norm,
  /// 0-d fp64 on the device. Changes nothing where it or `loss` (0-d, of all ranks) is not finite,
  /// or where `objection`, which may be empty, gives NaN instead of 0 for the norm.
  using Objection = std::function<at::Tensor(const at::Tensor& norm)>;
  at::Tensor queue_step(const ops::KernelTable& kernels, double clip_norm, const at::Tensor& loss,
                        const Objection& objection);

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

  struct Untrained {
    std::vector<std::string> names;
    std::int64_t of = 0;  ///< All trained tensors, over all ranks.
  };
  /// Tensors whose gradient was never anything but zero on any rank, as far as the state tells:
  /// moments and momentum of AdamW and Muon forget nothing in a few hundred steps, and for SGD,
  /// whose momentum holds weight decay too, the largest gradient is kept until this is called.
  /// Called by all owners together, after the updates.
  Untrained untrained();

 private:
  struct Slot {
    nn::Parameter* parameter;
    at::Tensor owned;  ///< Its rows that this rank updates.
    at::Tensor master, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, momentum;
    bool decays;
    double weight_decay;
    std::uint64_t rounding_key;
    std::size_t rate;             ///< Its place in rates_.
    bool is_muon;                 ///< A matrix that Muon updates.
    at::Tensor largest_gradient;  ///< 0-d: of all steps, where the state does not tell.
  };
  /// Gradients that count in the norm.
  std::vector<at::Tensor> counted_gradients() const;
  /// Whether a step is AdamW's alone, with all tensors where the parameters are.
  bool is_plain_adamw() const { return options_.name == config::OptimName::kAdamW && !offload_; }
  /// AdamW's work of the step under way, by learning rate.
  std::vector<ops::AdamwGroup> adamw_groups(double lr, double gradient_multiplier) const;
  /// By slot, whether a gradient other than zero has reached the rows of this rank.
  std::vector<bool> touched() const;
  /// For slots whose state does not tell.
  void keep_largest(Slot& slot, const at::Tensor& gradient) const;
  void begin_step();
  void take_back_step();
  void add_moments(Slot& slot);
  void add_momentum(Slot& slot, bool is_used);
  std::size_t place_of_rate(double share);
  /// AdamW's tensors of each learning rate.
  std::vector<std::vector<ops::AdamwTensor>> adamw_tensors() const;
  ops::AdamwOptions adamw_options() const;
  void adamw(const ops::KernelTable& kernels, double lr, double gradient_multiplier);
  void sgd(double lr, double gradient_multiplier);
  void muon(double lr, double gradient_multiplier);

  std::vector<Slot> slots_;
  std::optional<StateOffload> offload_;
  config::OptimSection options_;
  Ranks ranks_;
  std::vector<double> rates_;  ///< Different learning rates, as shares of the step's.
  std::int64_t steps_ = 0, updates_ = 0;
  bool gathers_ = true;  ///< Until untrained() has found a gradient.
  at::Tensor numbers_;   ///< [rates,5] of the step under way, see ops::AdamwOptions::on_device.
};

}  // namespace heddle::train
