#include "plan/layout_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/generation_memory.h"
#include "train/idle_ranks.h"

namespace heddle::plan {
namespace {

using comm::Dim;

constexpr double kGib = 1u << 30;

std::vector<LayoutGroup> groups_of(const comm::Mesh& mesh) {
  std::vector<LayoutGroup> groups;
  for (const Dim dim :
       {Dim::kTp, Dim::kCp, Dim::kFsdp, Dim::kDp, Dim::kPp, Dim::kEp, Dim::kEfsdp, Dim::kEdp}) {
    const bool is_of_experts = dim == Dim::kEp || dim == Dim::kEfsdp || dim == Dim::kEdp;
    if (mesh.size(dim) == 1 || (is_of_experts && mesh.size(Dim::kEp) == 1)) continue;
    groups.push_back({comm::name(dim), mesh.size(dim), mesh.world_size() / mesh.size(dim),
                      mesh.ranks_along({dim})});
  }
  return groups;
}

std::string layers_of(const parallel::StagePlan& stages, std::int64_t rank) {
  std::string layers;
  for (std::int64_t chunk = 0; chunk < stages.chunks; ++chunk) {
    const auto [first, last] = stages.layers[chunk * stages.ranks + rank];
    layers += fmt::format("{}{}-{}", chunk > 0 ? ", " : "", first, last - 1);
  }
  return layers;
}

/// A run mixes policies over its layers and may find a faster one between these.
parallel::Recompute predicted_recompute(const Step& step, const config::RunConfig& config,
                                        std::int64_t world,
                                        const std::optional<Hardware>& hardware) {
  double memory_gib = config.train.memory_limit_gib;
  if (hardware && (memory_gib == 0 || hardware->memory_gib < memory_gib))
    memory_gib = hardware->memory_gib;
  // In the order of their time.
  for (const parallel::Recompute policy :
       {parallel::Recompute::kOff, parallel::Recompute::kElementwise,
        parallel::Recompute::kSelective}) {
    config::RunConfig fixed = config;
    fixed.train.recompute = policy;
    const StepOnRanks layout(step, fixed, world);
    double peak = 0;
    for (std::int64_t rank = 0; rank < layout.stages.ranks; ++rank)
      peak = std::max(peak, memory_of(layout, rank, memory_gib * kGib).peak);
    if (peak <= kUsableMemory * memory_gib * kGib) return policy;
  }
  return parallel::Recompute::kFull;
}

}  // namespace

double LayoutReport::peak_bytes() const {
  double peak = 0;
  for (const LayoutStage& stage : stages) peak = std::max(peak, stage.memory.peak);
  return peak;
}

LayoutReport plan_layout(const config::RunConfig& config, const models::Config& model,
                         std::int64_t world, const std::optional<Hardware>& hardware) {
  require_frozen_experts(config, model, world);
  const Step step = describe_step(config, model);
  config::RunConfig fixed = config;
  const bool is_auto = !config.train.recompute;
  if (is_auto) fixed.train.recompute = predicted_recompute(step, config, world, hardware);
  const StepOnRanks layout(step, fixed, world);
  LayoutReport report;
  report.recompute = layout.recompute;
  report.is_recompute_auto = is_auto;
  report.has_eight_bit_experts = layout.has_eight_bit_experts();
  report.mesh = layout.mesh.describe();
  report.groups = groups_of(layout.mesh);
  report.micro_batches = layout.micro_batches;
  train::StepRows rows = train::rows_of_step(config);
  rows.micro_batches = layout.micro_batches;
  report.idle = train::idle_ranks(layout.mesh, rows);
  report.tokens_per_step = layout.tokens * layout.size(Dim::kCp) * layout.micro_batches *
                           static_cast<double>(layout.mesh.data_size());
  report.traffic = traffic_of(layout);
  report.gathered_keys = gathered_keys_bytes(layout);
  const double device = hardware ? hardware->memory_gib * kGib : 0;
  for (std::int64_t rank = 0; rank < layout.stages.ranks; ++rank)
    report.stages.push_back(
        {rank, layers_of(layout.stages, rank), memory_of(layout, rank, device)});
  report.has_policy = step.generation.has_value();
  if (report.has_policy && !step.generation->is_here) report.rollout = rollout_memory(step, device);
  if (layout.stages.ranks > 1) {
    const parallel::PipelineSchedule schedule(layout.stages.ranks, layout.stages.chunks,
                                              static_cast<std::int64_t>(layout.micro_batches));
    report.schedule = schedule.draw();
    report.bubble = schedule.bubble();
  }
  if (hardware) {
    report.hardware = hardware;
    report.time = time_of(layout, report.traffic, *hardware);
  }
  return report;
}

}  // namespace heddle::plan
