#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/run_config.h"
#include "models/config.h"

namespace heddle::plan {

/// Bytes that the model objects of the fullest rank of one pipeline stage hold.
struct DryRank {
  std::int64_t rank = 0, stage_rank = 0;
  std::int64_t parameters = 0;  ///< Tensors that it holds a part of.
  double owned = 0;             ///< Rows that it alone loads, updates and saves.
  double resident = 0;          ///< Weights between blocks.
  double gathered = 0;          ///< The widest two blocks, or one and embedding or head.
  double gradients = 0;
  double optimizer = 0;
  std::int64_t blocks = 0;  ///< Stages of blocks whose forward and backward ran on shapes.
  bool ran_embedding = false, ran_head = false;
};

struct DryRunReport {
  std::string mesh;
  std::int64_t ranks = 0;
  double elements = 0;          ///< Elements of the parameters, each owned by exactly one rank.
  std::int64_t boxes = 0;       ///< Slices that the ranks would read.
  std::vector<DryRank> stages;  ///< By rank of the pipeline.
  bool has_eight_bit_experts = false;  ///< The run would keep them so after loading.
};

/// Builds the model objects of every rank without storage, as a start of the run would, and checks
/// that what they would load covers each parameter once. Of one rank of each pipeline stage it
/// makes the optimizer and runs embedding, every block and head forward and backward on shapes,
/// collectives included; routed experts as if all were chosen equally often. Throws what the start
/// would throw; ModelError where the slices do not fit.
DryRunReport dry_run(const config::RunConfig& config, const models::Config& model,
                     std::int64_t world);

}  // namespace heddle::plan
