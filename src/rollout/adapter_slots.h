#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "rollout/engine.h"

namespace heddle::rollout {

/// Memory for several versions of one set of adapters: while sequences go on with the versions that
/// they started with, the next one is written, and nothing pauses. With K + 2 of them a version may
/// be K versions old, and one is free. All ranks of the model make the same calls.
class AdapterSlots {
 public:
  /// Sets that change the modules which `like` changes. `placed` outlives it.
  AdapterSlots(assembly::ModelOnRanks& placed, const adapters::LoraSet& like, std::string name,
               std::int64_t count);

  /// A set that no request of the engine uses, for the next version's numbers; what the engine has
  /// kept of its old ones is forgotten. Null if all are in use: go on generating.
  adapters::LoraSet* free_set(Engine& engine);
  /// Its numbers are there: it becomes the engine's adapter, which is returned.
  std::shared_ptr<const Adapter> publish(Engine& engine, const adapters::LoraSet& set,
                                         std::int64_t version);

 private:
  std::string name_;
  std::vector<std::shared_ptr<adapters::LoraSet>> sets_;
};

/// Copies this rank's factors of a set to another one of the same modules and layout.
void copy_factors(const adapters::LoraSet& from, const adapters::LoraSet& to);

}  // namespace heddle::rollout
