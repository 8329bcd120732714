#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "config/run_config.h"
#include "parallel/pipeline.h"
#include "train/optimizer.h"
#include "train/recompute_choice.h"

namespace heddle::train {

/// `train.recompute: auto`: the first three steps recompute everything. The first warms up, the
/// other two measure what each kind of layer keeps and what running it again takes; then the ranks
/// together choose the policies that take the least time among those that fit the memory of every
/// rank, with kReserve of it left. The next step's peak is compared: if it leaves less than half of
/// that, or if one rank that trains alone runs out of memory in any step, less is kept from there
/// on, with a warning.
class AutoRecompute {
 public:
  /// Share of the memory that is left for the fragments between tensors and for steps that need
  /// more than the measured ones.
  static constexpr double kReserve = 0.06;
  static constexpr std::int64_t kMeasuredSteps = 3;

  /// `most_tokens`: of a micro-batch of any step, on all ranks along cp and tp. The others must
  /// outlive it; `pipeline` recomputes everything.
  AutoRecompute(const config::TrainSection& train, assembly::ModelOnRanks& setup,
                parallel::Pipeline& pipeline, Optimizer& optimizer, std::int64_t most_tokens);

  /// Runs one optimizer step whose largest micro-batch has `tokens` tokens. `step` may run again
  /// where it ran out of memory before the optimizer changed anything. Throws ConfigError where
  /// even full recomputation does not fit, with the bytes.
  void run(std::int64_t tokens, const std::function<void()>& step);

  /// Whether the choice was made and compared: from there on steps may be recorded as graphs.
  bool is_settled() const { return phase_ == Phase::kSettled; }
  const LayerPolicies& policies() const { return policies_; }
  /// Most bytes that this rank is expected to hold in a step with these policies; 0 before they
  /// were measured.
  double peak(const LayerPolicies& policies) const;
  /// Layers of which something runs again.
  std::int64_t recomputed_layers() const;

 private:
  enum class Phase { kWarmUp, kElementwise, kKept, kCompared, kSettled };
  /// Layers of one kind take the same.
  using Kind = std::pair<bool, bool>;  ///< Full attention, sparse MLP.
  using Layers = std::map<std::int64_t, parallel::RecomputeProbe::Layer>;

  void run_once(std::int64_t tokens, const std::function<void()>& step);
  /// The step as Phase kElementwise or kKept.
  void measure(std::int64_t tokens, const std::function<void()>& step);
  /// The step as Phase kCompared.
  void compare(std::int64_t tokens, const std::function<void()>& step);
  void choose();
  void apply(LayerPolicies policies);
  /// After a step ran out of memory: keeps less, or throws.
  void keep_less(const std::string& reason);
  std::vector<RecomputeCost> agreed_costs(const Layers& kept) const;
  bool fits(const LayerPolicies& policies, double share) const;
  /// Of all ranks the one that is fullest with the policies.
  struct Need {
    double peak = 0, memory = 0, seconds = 0;
  };
  Need agreed_need(const LayerPolicies& policies) const;
  double held_bytes() const;
  /// Bytes that tensors of this rank may hold.
  double memory_there() const;
  double scale(std::int64_t tokens) const;
  void say_choice() const;
  [[noreturn]] void refuse(const std::string& found) const;

  assembly::ModelOnRanks& setup_;
  parallel::Pipeline& pipeline_;
  Optimizer& optimizer_;
  comm::Group world_;
  double limit_bytes_;  ///< train.memory_limit_gib; 0: none.
  std::int64_t most_tokens_;
  Phase phase_ = Phase::kWarmUp;
  LayerPolicies policies_;
  Layers elementwise_;
  std::vector<RecomputeCost> costs_;          ///< By layer of the model.
  std::map<std::int64_t, double> step_rows_;  ///< By layer, of the measured step.
  StepMemory step_;
  double memory_bytes_ = 0;  ///< That there is.
  double beyond_bytes_ = 0;  ///< Bytes that a step was seen to need beyond the prediction.
};

/// Null unless train.recompute is auto.
std::unique_ptr<AutoRecompute> auto_recompute(const config::TrainSection& train,
                                              assembly::ModelOnRanks& setup,
                                              parallel::Pipeline& pipeline, Optimizer& optimizer,
                                              std::int64_t most_tokens);

}  // namespace heddle::train
