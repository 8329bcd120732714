#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "adapters/lora.h"
#include "assembly/model_on_ranks.h"

namespace heddle::tenants {

/// Sets of adapters in whose place others are trained: recorded work names their addresses, and the
/// factors of whoever is to be trained are copied there. Gradients stay where the work leaves them
/// and are lent to the set that they belong to, until its step has cleared them or the next
/// work overwrites them.
class StandIns {
 public:
  /// `base` outlives it.
  explicit StandIns(assembly::ModelOnRanks& base) : base_(base) {}

  /// One piece of recorded work.
  struct Place {
    std::shared_ptr<const adapters::LoraSet> set;
    /// By factor, where the work leaves its gradient; undefined where it leaves none.
    std::vector<at::Tensor> gradients;
    const adapters::LoraSet* borrower = nullptr;  ///< Who was lent them last.
  };

  /// A number that sets of the same modules, ranks and scales have in common.
  std::int64_t structure_of(const adapters::LoraSet& set) { return known(set).structure; }
  /// Stand-ins for these sets, with their structures; no two are one.
  std::vector<Place> places_for(const std::vector<const adapters::LoraSet*>& sets);
  /// Before the work runs: copies the factors of each set to its place. Borrowers that still hold
  /// gradients of these places get copies of their own.
  void bring(std::vector<Place>& places, const std::vector<const adapters::LoraSet*>& sets);
  /// After it was queued: lends its gradients, or adds them to those that wait for a step.
  void lend(std::vector<Place>& places, const std::vector<const adapters::LoraSet*>& sets);
  /// Before a set ends.
  void forget(const adapters::LoraSet& set) { sets_.erase(&set); }
  /// Frees the stand-ins that no place has any longer.
  void drop_unused();

 private:
  /// Module, rank, scale and, of experts, which factors they have.
  using Structure = std::vector<std::tuple<std::string, std::int64_t, double, nn::ExpertFactors>>;
  struct Known {
    std::int64_t structure;
    std::vector<nn::Parameter*> factors;
    at::Tensor values;  ///< The factors' memory, one after the other.
  };

  /// The set's factors in one allocation from now on: one copy brings them all.
  Known& known(const adapters::LoraSet& set);

  assembly::ModelOnRanks& base_;
  std::map<Structure, std::int64_t> structures_;
  std::map<const adapters::LoraSet*, Known> sets_;  ///< Stand-ins too.
  std::map<std::int64_t, std::vector<std::shared_ptr<const adapters::LoraSet>>>
      made_;  ///< By structure.
};

}  // namespace heddle::tenants
