#include "plan/dry_run.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "assembly/from_config.h"
#include "assembly/frozen_experts.h"
#include "assembly/model_on_ranks.h"
#include "assembly/model_units.h"
#include "assembly/rank_memory.h"
#include "base/errors.h"
#include "objective/classification.h"
#include "objective/embedding.h"
#include "objective/language_model.h"
#include "ops/autograd.h"
#include "ops/context_parallel/context_parallel.h"
#include "plan/parameters.h"
#include "plan/shape_kernels.h"
#include "train/micro_batch.h"
#include "train/optimizer.h"

namespace heddle::plan {
namespace {

using comm::Dim;

comm::Mesh mesh_of(const config::RunConfig& config, std::int64_t world, std::int64_t rank) {
  return {assembly::mesh_sizes(config.parallel, world), rank, world, config.parallel.ep};
}

class DryRun {
 public:
  DryRun(const config::RunConfig& config, const models::Config& model, std::int64_t world)
      : config_(config), model_(model), world_(world) {
    report_.has_eight_bit_experts = assembly::has_whole_experts(mesh_of(config, world, 0)) &&
                                    keeps_experts_in_eight_bits(config, model, world > 1);
  }

  DryRunReport run() {
    const comm::Mesh mesh = mesh_of(config_, world_, 0);
    report_.mesh = mesh.describe();
    report_.ranks = world_;
    for (std::int64_t rank = 0; rank < world_; ++rank) visit(rank);
    for (auto& [name, coverage] : coverages_) coverage.check(name, shapes_.at(name));
    for (const auto& [name, shape] : shapes_) {
      double elements = 1;
      for (const std::int64_t size : shape) elements *= static_cast<double>(size);
      report_.elements += elements;
    }
    return std::move(report_);
  }

 private:
  void visit(std::int64_t rank) {
    assembly::ModelOnRanks placed =
        assembly::place(recipe_of_plan(config_, model_),
                        assembly::context_of_shapes(config_, mesh_of(config_, world_, rank)));
    cover(placed);
    const std::int64_t stage = placed.context.mesh.coordinate(Dim::kPp);
    if (stage == static_cast<std::int64_t>(report_.stages.size())) run_stage(placed, rank, stage);
  }

  void cover(const assembly::ModelOnRanks& placed) {
    const auto add = [&](nn::Parameter& parameter) {
      shapes_.emplace(parameter.name(), parameter.global_shape());
      Coverage& coverage = coverages_[parameter.name()];
      if (!parameter.is_held() || parameter.is_copy()) return;
      // Replicas have frozen values that nothing else divides whole, each of them, but for those
      // that share a buffer with trained ones.
      const Dim replicas = parameter.is_expert() ? Dim::kEdp : Dim::kDp;
      const bool is_whole =
          parameter.has_memory() && parameter.owned().numel() == parameter.value().numel();
      if (!parameter.trainable() && is_whole && placed.context.mesh.coordinate(replicas) > 0)
        return;
      for (const Layout::Part& part : parameter.layout().parts) {
        coverage.add(part.global);
        ++report_.boxes;
      }
    };
    placed.model->visit_parameters(add);
    if (placed.adapters) placed.adapters->visit_parameters(add);
  }

  /// Shapes have no kernel that lays the form: bytes of the experts less those of their values and
  /// scales (ops/moe/frozen_experts.h).
  static double saved_by_eight_bits(models::Model& model) {
    double saved = 0;
    model.visit_expert_weights([&](nn::ExpertWeights& weights) {
      if (!weights.weight().is_held()) return;
      const at::Tensor& value = weights.weight().value();
      saved += static_cast<double>(value.nbytes()) - as_double(value.numel()) -
               4 * as_double(value.size(0));
    });
    return saved;
  }

  void run_stage(assembly::ModelOnRanks& placed, std::int64_t rank, std::int64_t stage) {
    DryRank dry{rank, stage};
    const train::Optimizer optimizer(placed.trainable, config_.optim, config_.train.seed,
                                     train::Optimizer::Ranks::of(placed.context.mesh));
    dry.optimizer = static_cast<double>(optimizer.state_bytes());
    const assembly::RankMemory memory = assembly::rank_memory(*placed.model, placed.adapters.get());
    dry.parameters = memory.parameters;
    dry.owned = static_cast<double>(memory.owned);
    dry.resident = static_cast<double>(memory.resident);
    if (report_.has_eight_bit_experts) dry.resident -= saved_by_eight_bits(*placed.model);
    dry.gathered = static_cast<double>(memory.gathered);
    dry.gradients = static_cast<double>(memory.gradients);
    run_on_shapes(placed, dry);
    report_.stages.push_back(dry);
  }

  /// A short sequence, which ends on the rank, and one that is long enough for every rank along cp
  /// and tp to have a part of each segment.
  void run_on_shapes(assembly::ModelOnRanks& placed, DryRank& dry) {
    const auto length = static_cast<std::size_t>(64 * placed.model->padded_tokens(1));
    const std::vector<std::int32_t> tokens(length, 1);
    const std::vector<float> weights(length, 1);
    const auto sequence = [&](std::size_t n) {
      return data::SequenceView{std::span(tokens).first(n), std::span(tokens).first(n),
                                std::span(weights).first(n)};
    };
    const std::vector<data::SequenceView> sequences = {sequence(2), sequence(length - 2)};
    const bool is_classifier = placed.model->head() == models::Head::kClassify;
    const objective::LocalBatch batch(*placed.model,
                                      data::Batch::from_sequences(sequences, {}, is_classifier));
    const comm::Mesh& mesh = placed.context.mesh;
    if (dry.stage_rank == 0) run_embedding(placed, batch, dry);
    run_blocks(placed, batch, dry);
    if (dry.stage_rank + 1 == mesh.size(Dim::kPp)) run_head(placed, batch, dry);
    if (!placed.sharding) return;
    const parallel::EndUnits ends = assembly::end_units(*placed.model);
    for (const auto& units : {ends.own_behind, ends.own_before}) {
      for (const std::size_t unit : units) placed.sharding->reduce(unit);
    }
    placed.sharding->finish_reduction();
  }

  /// A gradient of hidden states, or room for them.
  static at::Tensor hidden_states(const assembly::ModelOnRanks& placed,
                                  const objective::LocalBatch& batch) {
    return at::empty(batch.hidden_sizes(*placed.model),
                     at::TensorOptions().dtype(placed.context.dtype).device(placed.context.device));
  }

  void run_embedding(assembly::ModelOnRanks& placed, const objective::LocalBatch& batch,
                     DryRank& dry) {
    const parallel::Acquired table(placed.sharding.get(),
                                   assembly::end_units(*placed.model).before);
    const at::Tensor hidden = placed.model->embed(batch.device.tokens);
    const at::Tensor expected = hidden_states(placed, batch);
    TORCH_CHECK(hidden.sizes() == expected.sizes(), "the embedding: hidden states of ",
                hidden.sizes(), " instead of ", expected.sizes());
    if (hidden.requires_grad()) ops::run_backward({hidden}, {expected});
    dry.ran_embedding = true;
  }

  /// Losses that compare texts need values, which shapes have not: their heads run with another.
  static objective::HeadResult head_of_shapes(const assembly::ModelOnRanks& placed,
                                              const at::Tensor& hidden,
                                              const objective::LocalBatch& batch) {
    switch (placed.model->head()) {
      case assembly::Head::kLanguageModel:
        return objective::language_model_head(*placed.model, 1)(hidden, batch);
      case assembly::Head::kClassify:
        return objective::Classification(placed).heads({&batch.host, 1}, {})[0](hidden, batch);
      case assembly::Head::kEmbed:
        break;
    }
    return objective::train_embedding_head(
        *placed.model, hidden, batch.host, [](const at::Tensor& embeddings) {
          return objective::ContrastiveResult{{}, at::empty_like(embeddings)};
        });
  }

  void run_head(assembly::ModelOnRanks& placed, const objective::LocalBatch& batch, DryRank& dry) {
    const parallel::Acquired weights(placed.sharding.get(),
                                     assembly::end_units(*placed.model).behind);
    const at::Tensor hidden = hidden_states(placed, batch);
    const objective::HeadResult head = head_of_shapes(placed, hidden, batch);
    TORCH_CHECK(head.grad_hidden.sizes() == hidden.sizes(), "the head: a gradient of ",
                head.grad_hidden.sizes(), " for hidden states of ", hidden.sizes());
    for (nn::Parameter* parameter : placed.trainable) parameter->collect_gradient();
    dry.ran_head = true;
  }

  void run_blocks(assembly::ModelOnRanks& placed, const objective::LocalBatch& batch,
                  DryRank& dry) {
    nn::Pass pass = batch.pass(*placed.model, /*training=*/true);
    pass.recompute_elementwise = config_.train.recompute != parallel::Recompute::kOff;
    pass.pooled_auxiliary_loss = config_.train.router_aux_loss == config::AuxLoss::kHf;
    for (parallel::BlockEntry& entry :
         assembly::block_entries(*placed.model, placed.adapters.get())) {
      if (!entry.parameters.front()->is_held()) continue;
      if (placed.sharding) placed.sharding->acquire(entry.unit);
      for (std::size_t stage = 0; stage < entry.block->stages(); ++stage) {
        at::Tensor hidden = hidden_states(placed, batch);
        hidden.set_requires_grad(true);
        const nn::BlockOutput output = entry.block->forward(stage, hidden, pass);
        TORCH_CHECK(output.hidden.sizes() == hidden.sizes(), "layer ", entry.unit - 1,
                    ": hidden states of ", output.hidden.sizes(), " for ", hidden.sizes());
        ops::Tensors outputs = {output.hidden}, gradients;
        if (output.auxiliary_loss.defined()) outputs.push_back(output.auxiliary_loss);
        for (const at::Tensor& y : outputs) gradients.push_back(at::empty_like(ops::detached(y)));
        ops::run_backward(outputs, gradients);
        ++dry.blocks;
      }
      for (nn::Parameter* parameter : entry.parameters) parameter->collect_gradient();
      if (placed.sharding) {
        placed.sharding->release(entry.unit);
        placed.sharding->reduce(entry.unit);
      }
    }
  }

  config::RunConfig config_;
  const models::Config& model_;
  std::int64_t world_;
  ShapeKernels shape_kernels_;
  DryRunReport report_;
  std::map<std::string, Coverage> coverages_;
  std::map<std::string, std::vector<std::int64_t>> shapes_;
};

}  // namespace

DryRunReport dry_run(const config::RunConfig& config, const models::Config& model,
                     std::int64_t world) {
  require_frozen_experts(config, model, world);
  if (config.rollout.merge_adapter)
    require_merged_adapter(config, describe_step(config, model), mesh_of(config, world, 0));
  return DryRun(config, model, world).run();
}

}  // namespace heddle::plan
