#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "adapters/lora.h"
#include "config/run_config.h"
#include "data/batch.h"
#include "models/qwen3_5/model.h"
#include "parallel/block_runner.h"
#include "parallel/sharding.h"
#include "train/head.h"

namespace heddle::train {

/// The unit of the sharding that holds what surrounds the blocks; block i is unit i + 1.
inline constexpr std::size_t kRootUnit = 0;

/// The model's layers as the runner takes them, with their adapters' parameters.
std::vector<parallel::BlockEntry> block_entries(models::qwen3_5::Model& model);

/// The runner's part of train.recompute; the elementwise part is in MicroBatchOptions.
parallel::Recompute recompute_of(config::Recompute policy);

/// What this rank does of a micro-batch that all ranks along cp read.
struct LocalBatch {
  LocalBatch(const models::qwen3_5::Model& model, const data::Batch& whole);

  data::Batch host;                                     ///< The rank's tokens, or all.
  data::Batch device;                                   ///< The same on the model's device.
  std::shared_ptr<const ops::ContextParallel> context;  ///< Null if the rank has all tokens.

  nn::BlockInputs inputs(const models::qwen3_5::Model& model, bool training) const;
};

/// Loss and gradient on the hidden states [T,H] of one micro-batch, which is on the host.
using HeadFunction = std::function<HeadResult(const at::Tensor& hidden, const data::Batch&)>;

/// run_head for training: gradients are those of gradient_scale * loss_sum.
HeadFunction training_head(models::qwen3_5::Model& model, double gradient_scale);

struct MicroBatchOptions {
  double auxiliary_scale = 0;          ///< Of the gradient of the router's loss.
  bool pooled_auxiliary_loss = false;  ///< train.router_aux_loss hf.
  std::uint64_t dropout_stream = 0;
  bool recompute_elementwise = false;  ///< See nn::BlockInputs.
  /// With several ranks: what holds the parameters, and whether this is the step's last
  /// micro-batch, after which the gradients are summed.
  parallel::Sharding* sharding = nullptr;
  bool is_last = true;
};

struct MicroBatchLoss {
  at::Tensor loss_sum;       ///< 0-d, fp32 or wider.
  at::Tensor auxiliary_sum;  ///< Undefined without a router's loss.
  at::Tensor expert_load;    ///< See expert_load.h; undefined without experts.
};

/// Forward and backward of one micro-batch, which is on the host and the same on all ranks along
/// cp: adds to the gradients of `trainable` and waits for nothing. `adapters` may be null.
MicroBatchLoss run_micro_batch(models::qwen3_5::Model& model, adapters::LoraSet* adapters,
                               parallel::BlockRunner& runner,
                               const std::vector<nn::Parameter*>& trainable,
                               const data::Batch& host_batch, const HeadFunction& head_function,
                               const MicroBatchOptions& options);

}  // namespace heddle::train
