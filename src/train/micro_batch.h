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
#include "parallel/pipeline.h"
#include "parallel/sharding.h"
#include "train/head.h"
#include "train/router_replay.h"

namespace heddle::train {

/// What this rank does of a micro-batch that all ranks along cp read.
struct LocalBatch {
  /// `set`: the adapters of all its rows; null: the base model. `dropout_step`, from 1: draws what
  /// they drop in it, if they drop anything.
  LocalBatch(const models::Model& model, const data::Batch& whole,
             const adapters::LoraSet* set = nullptr, std::uint64_t dropout_step = 0);

  data::Batch host;                                     ///< The rank's tokens, or all.
  data::Batch device;                                   ///< The same on the model's device.
  std::shared_ptr<const ops::ContextParallel> context;  ///< Null if the rank has all tokens.
  std::vector<nn::AdaptedRows> adapters;                ///< See nn::Pass.

  nn::Pass pass(const models::Model& model, bool training) const;
  /// Of this rank's hidden states: [T/tp,H].
  std::vector<std::int64_t> hidden_sizes(const models::Model& model) const;
};

/// Loss and gradient on the rank's hidden states [T/tp,H] of one micro-batch, which is on the host.
using HeadFunction = std::function<HeadResult(const at::Tensor& hidden, const data::Batch&)>;

/// run_head for training: gradients are those of gradient_scale * loss_sum.
HeadFunction training_head(models::Model& model, double gradient_scale);

/// Tokens of the largest, as the ranks pad them; 0 without any.
std::int64_t largest_micro_batch(const models::Model& model, std::span<const data::Batch> batches);

struct MicroBatchOptions {
  double auxiliary_scale = 0;          ///< Of the gradient of the router's loss.
  bool pooled_auxiliary_loss = false;  ///< train.router_aux_loss hf.
  std::uint64_t dropout_step = 0;      ///< The step, from 1; 0: no dropout.
  RouterReplay* router = nullptr;      ///< Records or gives the experts of this step; may be null.
  /// The micro-batches, where they lie on the device already.
  std::span<const LocalBatch> uploaded = {};
  /// With several ranks: what holds the parameters and sums their gradients.
  parallel::Sharding* sharding = nullptr;
};

struct MicroBatchLoss {
  at::Tensor loss_sum;       ///< 0-d, fp32 or wider; 0 where the last stage is elsewhere.
  at::Tensor entropy_sum;    ///< The same of the entropies; 0 for heads without any.
  at::Tensor auxiliary_sum;  ///< 0-d; of the layers that are here.
  at::Tensor expert_load;    ///< See train/expert_load.h; undefined without experts.
};

/// Forward and backward of a step's micro-batches, which are on the host and the same on all ranks
/// along cp and pp, in the order of the pipeline: adds to the gradients of `trainable` and waits
/// for nothing but other ranks. `heads`: one a micro-batch. `adapters` may be null.
MicroBatchLoss run_micro_batches(models::Model& model, const adapters::LoraSet* adapters,
                                 parallel::Pipeline& pipeline,
                                 const std::vector<nn::Parameter*>& trainable,
                                 std::span<const data::Batch> batches,
                                 const std::vector<HeadFunction>& heads,
                                 const MicroBatchOptions& options);

/// Over the ranks that have a part of the losses; of the router's if there is one.
void sum_over_ranks(const comm::Group& group, bool has_auxiliary, MicroBatchLoss& sums);

/// Hidden states [T/tp,H] of a batch after the last layer, without gradients; undefined where the
/// last stage is elsewhere.
at::Tensor evaluate_hidden(models::Model& model, parallel::Pipeline& pipeline,
                           const LocalBatch& batch);

}  // namespace heddle::train
