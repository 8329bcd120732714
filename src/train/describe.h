#pragma once

#include <cstdint>
#include <vector>

#include "config/run_config.h"
#include "train/observer.h"
#include "train/optimizer.h"
#include "train/setup.h"

namespace heddle::train {

/// The start-up table's facts of model, memory, kernels and data. Parameters are counted over
/// all ranks, memory is that of this one. `micro_batches`: of a data rank in a usual step, of
/// which a stage of a pipeline has several in flight.
RunInfo describe_setup(const Setup& setup, const config::RunConfig& config,
                       const Optimizer& optimizer, double micro_batches);

/// Elements that one token leaves for the backward of one layer on one of the ranks along tp. These
/// divide all but the gathered rows that projections read. `offloads_inputs`:
/// train.offload_activations, the block's input waits on the host.
double kept_elements(const models::LayerShape& layer, parallel::Recompute recompute,
                     bool offloads_inputs, std::int64_t tensor_ranks);

/// Estimate of the bytes that one token leaves for the backward of these layers on one of the ranks
/// along tp.
double activation_bytes_per_token(const models::Config& config,
                                  const std::vector<std::int64_t>& layers,
                                  std::int64_t element_bytes, const config::TrainSection& train,
                                  std::int64_t tensor_ranks);

}  // namespace heddle::train
