#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "adapters/lora.h"
#include "assembly/model_on_ranks.h"
#include "tenants/trainer.h"
#include "train/optimizer.h"
#include "train/untrained.h"

namespace heddle::tenants {

/// One set of adapters in training.
struct TrainedSet {
  SetOptions options;
  std::unique_ptr<adapters::LoraSet> factors;
  std::unique_ptr<train::Optimizer> optimizer;
  /// Gradients since the last step were dropped, as a pass failed with a part of them added.
  bool refuses_step = false;
  train::UntrainedWatch untrained = {};

  void drop_gradients(bool refuses) {
    factors->visit_parameters([](nn::Parameter& factor) { factor.clear_gradient(); });
    refuses_step = refuses;
  }
};

/// Throws ConfigError where gradients and optimizer of a set with these factors, which have their
/// memory, take more than `free_bytes`.
void require_room(const adapters::LoraSet& factors, std::int64_t free_bytes);

/// AdamW over a set's factors, whose numbers come with each step.
std::unique_ptr<train::Optimizer> make_optimizer(assembly::ModelOnRanks& base,
                                                 const adapters::LoraSet& factors,
                                                 std::uint64_t seed);

/// A new one. Throws ConfigError for options that the model does not take.
TrainedSet make_trained_set(assembly::ModelOnRanks& base, const SetOptions& options);

/// A step of one set.
struct SetStep {
  train::Optimizer* optimizer;
  double lr = 0, clip_norm = 0;  ///< 0: no clipping.
  double loss = 0;               ///< Where it is not finite, nothing is updated.
};
/// Clips by each set's own norm, updates and clears its gradients: the bits of each set's step by
/// itself, in launches that the sets share. No set twice.
std::vector<StepResult> step(assembly::ModelOnRanks& base, std::span<const SetStep> steps);

/// A copy of the factors on the same model.
std::unique_ptr<adapters::LoraSet> copy_of(assembly::ModelOnRanks& base,
                                           const adapters::LoraSet& factors);

/// The factors of a saved directory, to be read alone. Throws ModelError.
std::unique_ptr<adapters::LoraSet> load_factors(assembly::ModelOnRanks& base,
                                                const std::filesystem::path& directory);

/// See Trainer::save_snapshot().
void save_factors(assembly::ModelOnRanks& base, const adapters::LoraSet& factors,
                  const std::filesystem::path& directory);

/// See Trainer::save() and load().
void save_trained_set(assembly::ModelOnRanks& base, const TrainedSet& set,
                      const std::filesystem::path& directory, SavedFor purpose, bool overwrite);
TrainedSet load_trained_set(assembly::ModelOnRanks& base, const std::filesystem::path& directory,
                            bool with_optimizer);

}  // namespace heddle::tenants
