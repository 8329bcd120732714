#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "adapters/lora.h"
#include "models/model.h"
#include "parallel/pipeline.h"
#include "parallel/sharding.h"

/// A model as parallel/ takes it: units of the sharding, blocks, stages.
namespace heddle::assembly {

/// The units before the first layer and after the last one, with those that they read: a tied head
/// needs the embedding's. Units of the sharding are numbered as Model::units().
parallel::EndUnits end_units(const models::Model& model);
/// All of them for the life of the result; `sharding` may be null.
parallel::Acquired acquire_ends(parallel::Sharding* sharding, const models::Model& model);
/// All units of this rank: the whole of its stage is gathered.
parallel::Acquired acquire_all(parallel::Sharding* sharding, const models::Model& model);

/// The model's layers as the runner takes them, with the factors that `adapters` has for them;
/// null: without adapters.
std::vector<parallel::BlockEntry> block_entries(models::Model& model,
                                                const nn::AdapterSet* adapters = nullptr);

/// Divides the model's parameters over the ranks of its mesh: storage, without values.
std::unique_ptr<parallel::Sharding> shard_model(
    models::Model& model, parallel::Summing summing = parallel::Summing::kStep);
/// Divides the adapters alike, each in the unit of its linear layer.
void shard_adapters(models::Model& model, const adapters::LoraSet& adapters,
                    parallel::Sharding& sharding);

}  // namespace heddle::assembly
