#pragma once

#include <memory>

#include "config/run_config.h"
#include "data/readers/jsonl_reader.h"
#include "objective/objective.h"

/// Objective and rows as a run's configuration names them; no other source of this layer knows it.
namespace heddle::objective {

/// How the rows of a run are read: what they are for, and which texts one holds.
data::ReaderOptions reader_options(const config::RunConfig& config);

/// The objective of a run over its model, which must outlive it.
std::unique_ptr<Objective> make_objective(const config::RunConfig& config,
                                          const assembly::ModelOnRanks& placed);

}  // namespace heddle::objective
