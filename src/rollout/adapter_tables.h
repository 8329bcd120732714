#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "nn/row_adapters.h"

namespace heddle::rollout {

/// The factors of the sets that decode, by slot, at addresses that stay: recorded steps find each
/// row's there (nn::RowAdapters). A set gets a slot when it first decodes, and keeps it until
/// another one needs it.
class AdapterTables {
 public:
  /// Whether the model's kernels read them.
  static bool can_serve(const assembly::ModelOnRanks& placed);

  /// For up to `slots` sets at a time. `placed` outlives it.
  AdapterTables(assembly::ModelOnRanks& placed, std::int64_t slots);

  /// The sets of rows, null for the base model.
  using Sets = std::vector<std::shared_ptr<const nn::AdapterSet>>;
  /// Whether the kernels read the set's factors where they lie; true for none.
  bool takes(const std::shared_ptr<const nn::AdapterSet>& set) const;
  /// Gives every set a slot. True if layers came to be changed that were not, which recorded steps
  /// do not know.
  bool place(const Sets& sets);
  // For sets that have slots:
  /// Columns of the lows of their rows, see ops::LowRankSlots; 0 if all are the base model.
  std::int64_t rank_of(const Sets& sets) const;
  /// [N,4], see ops::LowRankSlots::runs, of so many rows; those beyond these sets' have none. N is
  /// a power of two: one recorded step serves mixtures of about as many runs.
  at::Tensor runs(const Sets& sets, std::int64_t rows) const;
  /// The tables as they are now, for runs that are filled in later.
  nn::RowAdapters adapters(const at::Tensor& runs, std::int64_t rank) const;
  /// After factors may have moved.
  void forget();

 private:
  struct Slot {
    std::weak_ptr<const nn::AdapterSet> set;
    const nn::AdapterSet* address = nullptr;
    std::int64_t rank = 0;  ///< Its widest change's.
    std::int64_t last_used = 0;
  };
  std::int64_t find(const std::shared_ptr<const nn::AdapterSet>& set) const;
  std::int64_t free_slot() const;
  /// Returns the rank.
  std::int64_t write(std::int64_t slot, const nn::AdapterSet& set) const;

  std::vector<const nn::Linear*> linears_;
  std::vector<bool> is_changed_;
  at::Tensor table_;  ///< [layers + 1,slots,3], the last of a layer that none changes.
  std::vector<Slot> slots_;
  std::int64_t step_ = 0;
};

}  // namespace heddle::rollout
