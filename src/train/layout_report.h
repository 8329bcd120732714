#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "config/run_config.h"
#include "models/qwen3_5/config.h"
#include "parallel/pipeline.h"

namespace heddle::train {

/// Who talks to whom along one dimension of the mesh.
struct LayoutGroup {
  std::string dimension;
  std::int64_t size, count;            ///< Ranks of a group, and groups.
  std::vector<std::int64_t> of_rank0;  ///< The group of rank 0.
};

/// What one rank receives of one kind in one optimizer step. Of several stages the most.
struct LayoutTraffic {
  std::string dimension, what;
  double bytes;
};

/// Memory of one rank of the pipeline, bytes; activations are an estimate.
struct LayoutMemory {
  std::int64_t stage_rank;
  std::string layers;  ///< "0-11, 24-35"
  double weights, gradients, optimizer, activations;

  double sum() const { return weights + gradients + optimizer + activations; }
};

/// A layout worked out without starting it.
struct LayoutReport {
  std::string mesh;
  std::vector<LayoutGroup> groups;  ///< Of the dimensions above 1.
  double tokens_per_step, micro_batches;
  std::vector<LayoutTraffic> traffic;
  std::vector<LayoutMemory> memory;
  std::vector<std::string> schedule;  ///< Empty without a pipeline.
  double bubble = 0;
};

/// Works out the layout of a run of `world` ranks for steps of full rows (data.max_length tokens).
/// Throws ConfigError as the run would.
LayoutReport plan_layout(const config::RunConfig& config, const models::qwen3_5::Config& model,
                         std::int64_t world);

}  // namespace heddle::train
