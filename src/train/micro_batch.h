#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "adapters/lora.h"
#include "comm/group.h"
#include "config/run_config.h"
#include "data/batch.h"
#include "models/model.h"
#include "objective/objective.h"
#include "parallel/pipeline.h"
#include "parallel/sharding.h"
#include "train/router_replay.h"

namespace heddle::train {

struct MicroBatchOptions {
  double auxiliary_scale = 0;          ///< Scale of the gradient of the router's loss.
  bool pooled_auxiliary_loss = false;  ///< train.router_aux_loss hf.
  std::uint64_t dropout_step = 0;      ///< The step, from 1; 0: no dropout.
  objective::Neftune neftune;          ///< Noise of embedded tokens in a step with a number.
  std::size_t metrics = 1;             ///< As many as the head functions sum.
  RouterReplay* router = nullptr;      ///< Records or gives the experts of this step; may be null.
  /// The experts are given, by the batches or by `router`: MicroBatchLoss::replayed is wanted.
  bool replays_experts = false;
  /// The micro-batches, where they lie on the device already.
  std::span<const objective::LocalBatch> uploaded = {};
  /// With several ranks: what holds the parameters and sums their gradients.
  parallel::Sharding* sharding = nullptr;
};

/// Noise of a run's embedded tokens.
objective::Neftune neftune_of(const config::TrainSection& train);

struct MicroBatchLoss {
  at::Tensor loss_sum;  ///< 0-d, fp32 or wider; 0 where the last stage is elsewhere.
  std::vector<at::Tensor> metric_sums;  ///< Alike, of HeadResult::metric_sums.
  at::Tensor auxiliary_sum;             ///< 0-d; of the layers that are here.
  at::Tensor expert_load;               ///< See train/expert_load.h; undefined without experts.
  /// [2] int64: choices of experts that were replayed, and those of them that the routers would
  /// have made; undefined unless wanted.
  at::Tensor replayed;
};

/// Forward and backward of a step's micro-batches, which are on the host and the same on all ranks
/// along cp and pp, in the order of the pipeline: adds to the gradients of `trainable` and waits
/// for nothing but other ranks. `heads`: one a micro-batch. `adapters` may be null.
MicroBatchLoss run_micro_batches(models::Model& model, const adapters::LoraSet* adapters,
                                 parallel::Pipeline& pipeline,
                                 const std::vector<nn::Parameter*>& trainable,
                                 std::span<const data::Batch> batches,
                                 const std::vector<objective::HeadFunction>& heads,
                                 const MicroBatchOptions& options);

/// Over the ranks that have a part of the losses; of the router's if there is one.
void sum_over_ranks(const comm::Group& group, bool has_auxiliary, MicroBatchLoss& sums);

}  // namespace heddle::train
