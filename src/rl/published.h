#pragma once

#include <cstdint>
#include <string>

#include "assembly/model_on_ranks.h"
#include "config/run_config.h"
#include "sync/weight_sync.h"

namespace heddle::rl {

/// Visits what a trainer gives to rollouts, in one order on all ranks: the adapters and what is
/// trained beside them, or without adapters the whole model.
sync::Visit published(const config::RunConfig& config, const assembly::ModelOnRanks& model);

/// A hash of weights as the ledger keeps it: "MANIFEST/WEIGHTS" in hexadecimal digits. Weights laid
/// into other buckets have another first part, and the second ones say nothing about each other.
std::string hash_text(const sync::Manifest& manifest, std::uint64_t weights_hash);

}  // namespace heddle::rl
