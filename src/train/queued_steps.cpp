#include "train/queued_steps.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "assembly/from_config.h"
#include "base/log.h"
#include "comm/device_watch.h"
#include "comm/world.h"
#include "device/device.h"
#include "ops/kernel_choice.h"
#include "ops/moe/moe.h"
#include "train/auxiliary_loss.h"

namespace heddle::train {

using objective::LocalBatch;
using objective::LossRows;
namespace {

/// Graphs share their memory; what bounds their number is the time to record them.
constexpr std::size_t kMostGraphs = 32;
/// After so many different shapes the run is told that nothing is recorded.
constexpr std::size_t kNewShapes = 64;

/// Loss rows are rounded up to 1/32 of the tokens: at most so many graphs for one shape of
/// sequences, and 1.5 % more rows in the head on average.
std::int64_t row_multiple(std::int64_t tokens) { return std::max<std::int64_t>(128, tokens / 32); }

void add_shape(const LocalBatch& batch, const LossRows& rows, std::vector<std::int64_t>& shape) {
  const data::Batch& host = batch.host;
  shape.insert(shape.end(),
               {host.size(), host.real_tokens, host.position_ids.dim(), rows.labels.numel(),
                static_cast<std::int64_t>(host.cu_seqlens_host.size())});
  shape.insert(shape.end(), host.cu_seqlens_host.begin(), host.cu_seqlens_host.end());
}

/// Copies between equal shapes. Undefined tensors are so in both.
void copy(const at::Tensor& from, at::Tensor& to) {
  if (to.defined()) to.copy_(from);
}

void copy(const LocalBatch& from, LocalBatch& to) {
  for (const auto tensor : {&data::Batch::tokens, &data::Batch::position_ids})
    copy(from.device.*tensor, to.device.*tensor);
  for (std::size_t i = 0; i < to.adapters.size(); ++i)
    copy(from.adapters[i].draws, to.adapters[i].draws);
  copy(from.noise_draws, to.noise_draws);
}

void copy(const LossRows& from, LossRows& to) {
  for (const auto tensor :
       {&LossRows::index, &LossRows::labels, &LossRows::loss_weights, &LossRows::gradient_weights})
    copy(from.*tensor, to.*tensor);
}

/// Why steps need the host within; empty if they do not.
std::string obstacle(const config::RunConfig& config, const assembly::ModelOnRanks& setup,
                     const objective::Objective& objective, const Optimizer& optimizer) {
  const models::Model& model = *setup.model;
  if (!model.context().device.is_cuda()) return "the device is no GPU";
  const comm::Mesh& mesh = setup.context.mesh;
  if (mesh.size(comm::Dim::kPp) > 1) return "the stages of a pipeline wait for each other";
  if (!objective.is_sum_over_tokens()) return "the loss is no sum over tokens";
  if (model.config().is_moe()) {
    if (mesh.size(comm::Dim::kEp) > 1)
      return "the host counts the rows that other ranks' experts get";
    if (ops::runs_reference(model.kernels(), ops::MoeExperts::kName))
      return "the reference kernel of the experts counts rows on the host";
    if (!config.train.router_record.empty() || !config.train.router_replay.empty() ||
        config.rl.replays_experts())
      return "the choice of experts is recorded or replayed by the host";
  }
  if (config.train.grad_cosine) return "gradients are compared with those of the step before";
  if (config.train.offload_activations) return "inputs of blocks are offloaded";
  if (!optimizer.can_queue(model.kernels())) return "the optimizer waits for the host";
  return {};
}

}  // namespace

QueuedSteps::Queued::Outcome QueuedSteps::Queued::wait() {
  const std::vector<at::Tensor>& results = results_.wait();
  // The awaited work may have been given up.
  if (world_) world_->device_watch().check();
  const at::Tensor& numbers = results[0];
  return {{numbers[0], {numbers[1]}, numbers[2], results[1], {}},
          numbers[3].item<double>(),
          numbers[4].item<double>()};
}

QueuedSteps::QueuedSteps(const Parts& parts, bool record)
    : parts_(parts), record_(record), places_(kMostGraphs) {}

QueuedSteps::Queued QueuedSteps::queue(std::span<const data::Batch> batches,
                                       const Options& options) {
  Recorded step;
  step.auxiliary_scale = options.auxiliary_scale;
  step.shape = {std::bit_cast<std::int64_t>(options.auxiliary_scale), options.dropout_step > 0};
  for (const data::Batch& batch : batches) {
    step.batches.emplace_back(*parts_.model, batch, parts_.adapters, options.dropout_step,
                              parts_.neftune);
    const data::Batch& host = step.batches.back().host;
    step.rows.emplace_back(*parts_.model, host, options.loss_scale,
                           record_ ? row_multiple(host.size()) : 1);
    add_shape(step.batches.back(), step.rows.back(), step.shape);
  }
  parts_.optimizer->upload_numbers(options.lr);
  if (judges_spikes()) parts_.spikes->prepare(parts_.model->context().device);
  Results results;
  if (const Recorded* recorded = record_ && options.may_record ? recorded_for(step) : nullptr) {
    recorded->graph->replay();
    results = recorded->results;
  } else {
    if (release_graphs()) {
      record_ = false;
      log::warning(
          "steps are not recorded as graphs from here on: graphs and steps of other shapes do not "
          "fit "
          "the memory together");
    }
    results = enqueue(step);
  }
  return {device::Download({results.numbers, results.expert_load}),
          parts_.model->context().mesh.world()};
}

const QueuedSteps::Recorded* QueuedSteps::recorded_for(Recorded& step) {
  places_.meet(step.shape);
  std::vector<Shape> shapes;
  for (Recorded& known : recorded_) {
    shapes.push_back(known.shape);
    if (known.shape != step.shape) continue;
    for (std::size_t i = 0; i < step.batches.size(); ++i) {
      copy(step.batches[i], known.batches[i]);
      copy(step.rows[i], known.rows[i]);
    }
    return &known;
  }
  const auto [is_recorded, instead] = places_.judge(step.shape, shapes);
  if (is_recorded) {
    if (instead) recorded_.erase(recorded_.begin() + static_cast<std::ptrdiff_t>(*instead));
    return record(step);
  }
  if (recorded_.empty() && ++launched_ == kNewShapes) {
    log::info("no two of {} steps had the same sequence boundaries: they run launch by launch",
              kNewShapes);
  }
  return nullptr;
}

const QueuedSteps::Recorded* QueuedSteps::record(Recorded& step) {
  try {
    step.graph = device::record(
        parts_.model->context().device, [&] { step.results = enqueue(step); },
        recorded_.empty() ? nullptr : recorded_.front().graph.get());
  } catch (const std::exception& error) {
    log::warning("steps are not recorded as graphs, as that failed: {}", error.what());
    // Nothing ran: the gradients of the recording hold no values.
    for (nn::Parameter* parameter : *parts_.trainable) parameter->clear_gradient();
    record_ = false;
    recorded_.clear();
    return nullptr;
  }
  recorded_.push_back(std::move(step));
  return &recorded_.back();
}

QueuedSteps::Results QueuedSteps::enqueue(const Recorded& step) {
  std::vector<objective::HeadFunction> heads;
  std::vector<data::Batch> host;
  for (std::size_t i = 0; i < step.batches.size(); ++i) {
    host.push_back(step.batches[i].host);
    heads.push_back([this, &rows = step.rows[i]](const at::Tensor& hidden, const LocalBatch&) {
      return objective::run_language_model_head(*parts_.model, hidden, rows,
                                                /*want_gradients=*/true);
    });
  }
  MicroBatchLoss sums = run_micro_batches(*parts_.model, parts_.adapters, *parts_.pipeline,
                                          *parts_.trainable, host, heads,
                                          {.auxiliary_scale = step.auxiliary_scale,
                                           .pooled_auxiliary_loss = parts_.pooled_auxiliary_loss,
                                           .neftune = {},
                                           .metrics = 1,
                                           .uploaded = step.batches,
                                           .sharding = parts_.sharding});
  sum_over_ranks(parts_.model->context().mesh.loss_group(), step.auxiliary_scale > 0, sums);
  if (parts_.sharding != nullptr) parts_.sharding->finish_reduction();
  Optimizer::Objection objection;
  if (judges_spikes())
    objection = [this](const at::Tensor& norm) { return parts_.spikes->object(norm); };
  const at::Tensor norm = parts_.optimizer->queue_step(parts_.model->kernels(), parts_.clip_norm,
                                                       sums.loss_sum, objection);
  const at::Tensor threshold = judges_spikes()
                                   ? parts_.spikes->threshold_on_device()
                                   : at::full_like(norm, std::numeric_limits<double>::infinity());
  if (parts_.sharding != nullptr) parts_.sharding->publish();
  return {at::stack({sums.loss_sum.to(at::kDouble), sums.metric_sums[0].to(at::kDouble),
                     sums.auxiliary_sum.to(at::kDouble), norm, threshold}),
          sums.expert_load};
}

bool QueuedSteps::release_graphs() {
  if (recorded_.empty()) return false;
  const device::Memory memory = device::memory(parts_.model->context().device);
  // Memory of a step beyond what lasts, once in the graphs and once beside them.
  const std::int64_t of_step = memory.peak_bytes - memory.used_bytes;
  if (memory.used_bytes + 2 * of_step <= memory.total_bytes / 20 * 19) return false;
  recorded_.clear();
  return true;
}

std::unique_ptr<QueuedSteps> queued_steps(const config::RunConfig& config,
                                          assembly::ModelOnRanks& setup,
                                          const objective::Objective& objective,
                                          parallel::Pipeline& pipeline, Optimizer& optimizer,
                                          SpikePolicy& spikes) {
  const std::string reason = obstacle(config, setup, objective, optimizer);
  const bool is_alone = setup.context.mesh.world_size() == 1,
             is_wanted = config.train.cuda_graph == config::CudaGraph::kAuto;
  if (is_wanted && setup.context.device.is_cuda() && (!is_alone || !reason.empty())) {
    log::info("train.cuda_graph: steps are not recorded as graphs: {}",
              is_alone ? reason : "several ranks train together");
  }
  if (!reason.empty()) return nullptr;
  return std::make_unique<QueuedSteps>(
      QueuedSteps::Parts{
          setup.model.get(), setup.adapters.get(), &pipeline, &setup.trainable, &optimizer,
          config.train.router_aux_loss == config::AuxLoss::kHf &&
              assembly::auxiliary_coefficient(config, setup.model->config()) > 0,
          config.optim.clip_norm, &spikes, neftune_of(config.train), setup.sharding.get()},
      is_wanted && is_alone);
}

}  // namespace heddle::train
