#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "adapters/lora.h"
#include "config/run_config.h"
#include "models/model.h"
#include "parallel/pipeline.h"
#include "parallel/sharding.h"

/// A model as parallel/ takes it: units of the sharding, blocks, stages.
namespace heddle::train {

/// Units of the sharding: the embedding, block i as unit i + 1, and behind the last block final
/// norm and head.
inline constexpr std::size_t kEmbeddingUnit = 0;
std::size_t head_unit(const models::Model& model);
/// Which of them the embedding and the head need: a tied head both.
parallel::EndUnits end_units(const models::Model& model);
/// All of them for the life of the result; `sharding` may be null.
parallel::Acquired acquire_ends(parallel::Sharding* sharding, const models::Model& model);

/// The model's layers as the runner takes them, with their adapters' parameters.
std::vector<parallel::BlockEntry> block_entries(models::Model& model);

/// Divides the model's parameters over the ranks of its mesh: storage, without values.
std::unique_ptr<parallel::Sharding> shard_model(
    models::Model& model, parallel::Sharding::Summing summing = parallel::Sharding::Summing::kStep);
/// The same for the adapters, each in the unit of its linear layer.
void shard_adapters(models::Model& model, adapters::LoraSet& adapters,
                    parallel::Sharding& sharding);

/// This rank's stages under train.recompute and train.offload_activations; `sharding` may be null.
parallel::Pipeline make_pipeline(const config::TrainSection& train, models::Model& model,
                                 const parallel::StagePlan& stages, parallel::Sharding* sharding);

}  // namespace heddle::train
