#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "config/run_config.h"
#include "models/qwen3_5/config.h"
#include "parallel/block_runner.h"

namespace heddle::train {

/// The weight of the experts' load-balancing loss in a run: train.router_aux_loss_coef; if that is
/// -1 the checkpoint's router_aux_loss_coef where config.json asks for the loss
/// (output_router_logits), else 0; 0 without experts.
double auxiliary_coefficient(const config::RunConfig& config, const models::qwen3_5::Config& model);

/// Layers that have experts.
std::int64_t sparse_layers(const models::qwen3_5::Config& model);

/// train.router_aux_loss hf: the load-balancing loss E * sum_e f_e P_e of transformers
/// (load_balancing_loss_func), f_e and P_e being means over all sparse layers and all tokens of the
/// micro-batches that the ranks of `group`, which all call it, have at the time. `rows`: tokens x
/// layers of this rank. Returns this rank's part of the loss times the rows of all, 0-d (the
/// additive form of the other mode), and tells the pass how it depends on each layer's
/// probabilities.
at::Tensor pool_auxiliary_loss(parallel::BlockRunner::Pass& pass, double rows,
                               const comm::Group& group);

}  // namespace heddle::train
