#pragma once

#include <memory>

#include "assembly/model_on_ranks.h"

namespace heddle::assembly {

/// A new set of adapters on a placed model, divided over its ranks, without values. Throws
/// ConfigError for targets that match nothing.
std::unique_ptr<adapters::LoraSet> divided(NewAdapters adapters, ModelOnRanks& placed);

/// Gives adapters the values that they begin with, and the model those of the modules that were
/// trained beside them. Throws ModelError for values that have no place among them.
void start(const NewAdapters& adapters, const ModelOnRanks& placed, adapters::LoraSet& set);

/// A new set of adapters on a placed model that serves others already: as divided(), with the
/// values it starts from.
std::unique_ptr<adapters::LoraSet> put_on(const NewAdapters& adapters, ModelOnRanks& placed);

}  // namespace heddle::assembly
