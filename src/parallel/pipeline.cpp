#include "parallel/pipeline.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <set>

#include "models/unit.h"
#include "ops/autograd.h"
#include "ops/collectives.h"

namespace heddle::parallel {

using comm::Dim;

StagePlan StagePlan::balanced(const models::Config& model, std::int64_t ranks,
                              std::int64_t chunks) {
  const std::vector<std::int64_t> units = models::unit_costs(model);
  const std::vector<double> layers(units.begin() + 1, units.end() - 1);
  return {ranks, chunks,
          balanced_stages(layers, ranks * chunks, static_cast<double>(units.back()))};
}

std::vector<std::int64_t> StagePlan::layers_of(std::int64_t rank) const {
  std::vector<std::int64_t> all;
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const auto [first, last] = layers[chunk * ranks + rank];
    for (std::int64_t i = first; i < last; ++i) all.push_back(i);
  }
  return all;
}

double StagePlan::most_in_flight(std::int64_t rank, double micro_batches) const {
  if (chunks == 1) return std::min(micro_batches, static_cast<double>(ranks - rank));
  // More micro-batches than this come in the same order again and again.
  const auto scheduled =
      static_cast<std::int64_t>(std::min(micro_batches, 4 * static_cast<double>(ranks)));
  const PipelineSchedule schedule(ranks, chunks, scheduled);
  return static_cast<double>(schedule.most_in_flight(rank)) / static_cast<double>(chunks);
}

namespace {

/// The stage that runs each unit. What stands before the layers belongs to the first stage, what
/// stands after them to the last.
std::vector<std::int64_t> stages_of(const std::vector<models::Unit>& units, const StagePlan& plan) {
  std::vector<std::int64_t> stages;
  std::int64_t stage = 0, layer = 0;
  for (const models::Unit& unit : units) {
    if (unit.layer != nullptr) {
      while (layer >= plan.layers[stage].second) ++stage;
      ++layer;
    } else if (layer > 0) {
      stage = plan.stages() - 1;
    }
    stages.push_back(stage);
  }
  return stages;
}

}  // namespace

void hold_stages(models::Model& model, const StagePlan& plan, std::int64_t rank) {
  if (plan.ranks == 1) return;
  const std::vector<models::Unit>& units = model.units();
  std::set<std::size_t> held;
  const std::vector<std::int64_t> stages = stages_of(units, plan);
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (stages[i] % plan.ranks != rank) continue;
    held.insert(i);
    held.insert(units[i].reads.begin(), units[i].reads.end());
  }
  for (std::size_t i = 0; i < units.size(); ++i) {
    for (nn::Parameter* parameter : units[i].parameters) {
      parameter->set_held(held.contains(i));
      // Values count on the rank that runs their own unit, not where another unit reads them.
      if (held.contains(i) && stages[i] % plan.ranks != rank) parameter->set_copy();
    }
  }
}

Pipeline::Pipeline(const comm::Mesh& mesh, const StagePlan& plan,
                   const std::vector<BlockEntry>& blocks, bool embedding_trained,
                   const BlockRunnerOptions& options)
    : plan_(plan),
      hidden_("hidden states", mesh.ranks_along({Dim::kPp}), mesh.world(), "hidden states"),
      gradients_("gradients", mesh.ranks_along({Dim::kPp}), mesh.world(), "gradients") {
  bool is_trained = embedding_trained;
  for (std::int64_t number = 0; number < plan_.stages(); ++number) {
    const auto [first, last] = plan_.layers[number];
    const std::vector<BlockEntry> own(blocks.begin() + first, blocks.begin() + last);
    const bool is_trained_before = is_trained;
    for (const BlockEntry& block : own) is_trained = is_trained || block.is_trained();
    if (number % plan_.ranks != hidden_.rank()) continue;
    const bool is_last = number + 1 == plan_.stages();
    BlockRunnerOptions own_options = options;
    if (number > 0) own_options.ends.before.clear();
    if (!is_last) own_options.ends.behind.clear();
    stages_.push_back({number, first, number == 0, is_last, is_trained_before && number > 0,
                       is_trained || is_last, BlockRunner(own, own_options)});
  }
  // All ranks connect now, whatever each does first.
  hidden_.barrier();
  gradients_.barrier();
}

void Pipeline::set_recompute(const std::vector<Recompute>& by_layer) {
  for (Stage& stage : stages_) {
    const auto first = by_layer.begin() + stage.first_layer;
    stage.runner.set_recompute({first, first + static_cast<std::ptrdiff_t>(stage.runner.size())});
  }
}

void Pipeline::set_probe(RecomputeProbe* probe) {
  for (Stage& stage : stages_) stage.runner.set_probe(probe, stage.first_layer);
}

std::vector<PipelineAction> Pipeline::actions(std::int64_t micro_batches) const {
  return schedule(micro_batches).of(hidden_.rank());
}

at::Tensor Pipeline::evaluate(models::Model& model, const at::Tensor& tokens, const nn::Pass& pass,
                              std::vector<at::Tensor>* experts) {
  const ops::NoGradient guard;
  if (experts != nullptr) experts->resize(model.config().sparse_layers().size());
  const std::int64_t rows = ops::own_rows(tokens.size(0), model.tensor_group()).count;
  const auto options =
      at::TensorOptions().dtype(model.context().dtype).device(model.context().device);
  at::Tensor hidden;
  for (Stage& stage : stages_) {
    hidden = stage.is_first ? model.embed(tokens)
                            : receive_hidden(stage, 0, {rows, model.config().hidden_size}, options);
    std::vector<at::Tensor> here;
    if (experts != nullptr) {
      const auto first = experts->begin() + stage.first_layer;
      here.assign(first, first + static_cast<std::ptrdiff_t>(stage.runner.size()));
    }
    hidden = stage.runner.evaluate(hidden, pass, experts != nullptr ? &here : nullptr);
    for (std::size_t i = 0; i < here.size(); ++i)
      (*experts)[static_cast<std::size_t>(stage.first_layer) + i] = std::move(here[i]);
    if (!stage.is_last) send_hidden(stage, 0, hidden);
  }
  finish_sends();
  return has_last_stage() ? hidden : at::Tensor();
}

int Pipeline::tag(std::int64_t micro_batch, std::int64_t stage) const {
  return static_cast<int>(micro_batch * plan_.stages() + stage);
}

void Pipeline::send(const comm::Group& group, std::int64_t to_stage, int tag,
                    const at::Tensor& tensor) {
  Sent sent{&group == &gradients_, tag, tensor.contiguous(), {}};
  sent.pending = group.send_async(sent.tensor, to_stage % plan_.ranks, tag);
  sent_.push_back(std::move(sent));
}

at::Tensor Pipeline::receive(const comm::Group& group, std::int64_t from_stage, int tag,
                             at::IntArrayRef sizes, at::TensorOptions options) {
  at::Tensor tensor = at::empty(sizes, options);
  group.receive(tensor, from_stage % plan_.ranks, tag);
  return tensor;
}

void Pipeline::send_hidden(const Stage& stage, std::int64_t micro_batch, const at::Tensor& hidden) {
  send(hidden_, stage.number + 1, tag(micro_batch, stage.number), hidden);
}

at::Tensor Pipeline::receive_hidden(const Stage& stage, std::int64_t micro_batch,
                                    at::IntArrayRef sizes, at::TensorOptions options) {
  return receive(hidden_, stage.number - 1, tag(micro_batch, stage.number - 1), sizes, options);
}

void Pipeline::send_gradient(const Stage& stage, std::int64_t micro_batch,
                             const at::Tensor& gradient) {
  send(gradients_, stage.number - 1, tag(micro_batch, stage.number), gradient);
}

at::Tensor Pipeline::receive_gradient(const Stage& stage, std::int64_t micro_batch,
                                      at::IntArrayRef sizes, at::TensorOptions options) {
  return receive(gradients_, stage.number + 1, tag(micro_batch, stage.number + 1), sizes, options);
}

void Pipeline::drop_arrived(const PipelineAction& action) {
  for (const PipelineMessage& message : action.arrived) {
    const int of = tag(message.micro_batch, stages_[message.chunk].number);
    std::erase_if(sent_, [&](Sent& sent) {
      if (sent.is_gradient != message.is_gradient || sent.tag != of) return false;
      // On a device the stream waits, after which its memory is used again.
      sent.pending.wait();
      return true;
    });
  }
}

void Pipeline::finish_sends() {
  for (Sent& sent : sent_) sent.pending.wait();
  sent_.clear();
}

}  // namespace heddle::parallel
