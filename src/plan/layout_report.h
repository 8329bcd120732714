#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/run_config.h"
#include "models/config.h"
#include "plan/hardware.h"
#include "plan/step_on_ranks.h"
#include "plan/step_time.h"

namespace heddle::plan {

/// Who talks to whom along one dimension of the mesh.
struct LayoutGroup {
  std::string dimension;
  std::int64_t size, count;            ///< Ranks of a group, and groups.
  std::vector<std::int64_t> of_rank0;  ///< The group of rank 0.
};

/// One rank of the pipeline.
struct LayoutStage {
  std::int64_t stage_rank;
  std::string layers;  ///< "0-11, 24-35"
  Memory memory;
};

/// A layout worked out without starting it.
struct LayoutReport {
  std::string mesh;
  std::vector<LayoutGroup> groups;  ///< Groups of the dimensions above 1.
  std::vector<std::string> idle;    ///< Ranks without work, see train::idle_ranks().
  double tokens_per_step = 0, micro_batches = 0;
  /// Policy that the figures below hold for: train.recompute or, where that is auto, the fastest
  /// policy that fits the memory of hardware and train.memory_limit_gib in all layers; full if none
  /// does or neither is known.
  parallel::Recompute recompute = parallel::Recompute::kOff;
  bool is_recompute_auto = false;
  bool has_eight_bit_experts = false;  ///< Frozen ones are counted so.
  std::vector<Traffic> traffic;
  double gathered_keys = 0;  ///< Bytes, of one attention layer: see gathered_keys_bytes.
  std::vector<LayoutStage> stages;
  bool has_policy = false;               ///< A step is the update of a policy.
  std::optional<RolloutMemory> rollout;  ///< A rank's that only generates.
  std::vector<std::string> schedule;     ///< Empty without a pipeline.
  double bubble = 0;
  std::optional<Hardware> hardware;
  std::optional<StepTime> time;  ///< If the hardware is known.

  /// Bytes of the fullest rank.
  double peak_bytes() const;
};

/// Works out the layout of a run of `world` ranks for steps of full rows (data.max_length tokens).
/// Throws ConfigError as the run would.
LayoutReport plan_layout(const config::RunConfig& config, const models::Config& model,
                         std::int64_t world, const std::optional<Hardware>& hardware = {});

}  // namespace heddle::plan
