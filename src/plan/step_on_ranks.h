#pragma once

#include <string>
#include <vector>

#include "assembly/frozen_experts.h"
#include "comm/mesh.h"
#include "config/run_config.h"
#include "ops/context_parallel/plan.h"
#include "parallel/pipeline.h"
#include "plan/work.h"

namespace heddle::plan {

/// A step divided over ranks. Where ranks differ, the figures of one rank are its largest share.
struct StepOnRanks {
  /// Throws ConfigError where a run of this configuration would refuse to start. train.recompute
  /// auto counts as full.
  StepOnRanks(const Step& step, const config::RunConfig& config, std::int64_t world);

  const Step* step;
  comm::Mesh mesh;  ///< The mesh of rank 0.
  parallel::StagePlan stages;
  ops::ContextMethod method;
  parallel::Recompute recompute;
  bool sums_every_micro_batch;  ///< parallel.sum_gradients.
  double micro_batches = 0;     ///< Micro-batches of a data rank in a step.
  double tokens = 0;            ///< Tokens of a rank in a micro-batch.

  double size(comm::Dim dim) const { return static_cast<double>(mesh.size(dim)); }
  /// Ranks that a dense parameter, and an expert's, is sharded over.
  double shards() const { return size(comm::Dim::kFsdp) * size(comm::Dim::kCp); }
  double expert_shards() const { return size(comm::Dim::kEfsdp); }
  /// Ranks along ep that a token travels to.
  double expert_ranks() const;
  /// And embedding and head.
  double table_shards() const { return size(comm::Dim::kTp) * shards(); }
  /// Sets of adapters that the ranks which train keep besides their own.
  double pinned_sets() const {
    return step->generation && step->generation->is_here ? step->generation->pinned_sets : 0;
  }
  bool has_eight_bit_experts() const {
    return assembly::has_whole_experts(mesh) &&
           (mesh.world_size() == 1 ? step->has_eight_bit_experts
                                   : step->has_eight_bit_experts_on_ranks);
  }
  bool has_embedding(std::int64_t stage_rank) const {
    return stage_rank == 0 || (step->has_tied_head() && has_head(stage_rank));
  }
  bool has_head(std::int64_t stage_rank) const { return stage_rank + 1 == stages.ranks; }
};

/// Elements of the parameters of one rank of a pipeline, after tp and ep, before sharding.
struct Held {
  double dense = 0, experts = 0, tables = 0;  ///< tables: embedding and head of logits.
  double adapters = 0, expert_adapters = 0;   ///< Divided as dense parameters, and as experts.
  double trained_dense = 0, trained_experts = 0, trained_tables = 0, trained_classifier = 0;
  std::int64_t trained_blocks = 0;  ///< How many have something that is trained.
  double largest_dense_block = 0, largest_expert_block = 0;  ///< With their sets of adapters.
  double largest_table = 0;
  double merged = 0;           ///< Sums of matrices with their adapters (rollout.merge_adapter).
  double gathered_tables = 0;  ///< Bytes of a micro-batch: a tied table on one rank twice.

  double all() const { return dense + experts + tables; }
};
Held held_by(const StepOnRanks& layout, std::int64_t stage_rank);

/// Behind what a transfer can hide: the blocks of all micro-batches, or of the last one.
enum class Hiding { kNothing, kForward, kBackward, kLastBackward };

/// Bytes of one kind that one rank receives in one optimizer step; of several stages the most.
struct Traffic {
  std::vector<comm::Dim> over;  ///< The ranks it is received from.
  std::string what;
  double bytes = 0;
  double calls = 0;  ///< Collectives.
  Hiding hiding = Hiding::kNothing;
};
std::vector<Traffic> traffic_of(const StepOnRanks& layout);

/// Memory of one rank of the pipeline, bytes.
struct Memory {
  double weights = 0;    ///< With what is gathered for blocks that run.
  double gradients = 0;  ///< Of all that is trained.
  double optimizer = 0;
  double activations = 0;  ///< Of all micro-batches in flight.
  double working = 0;      ///< Logits of the head, or temporaries of the widest block.
  double others = 0;       ///< Critic and reference of reinforcement learning.
  double caches = 0;       ///< Generation's on the same ranks, as far as there is memory.
  double merged = 0;       ///< Copies of matrices with their adapters in them, on the same ranks.
  double pinned = 0;       ///< Sets of adapters that sequences began with, on the same ranks.
  double generating = 0;   ///< While they generate: weights, caches, what stays of the trainer's.
  double peak = 0;  ///< At the worst moment of a step; not all of the above are there at once.
};
/// `memory`: of a device, bytes, of which rollout.memory_fraction is a share; 0: not known.
Memory memory_of(const StepOnRanks& layout, std::int64_t stage_rank, double memory = 0);

/// Memory of a rank that only generates, bytes.
struct RolloutMemory {
  double weights = 0, caches = 0;
};

/// Keys and values of all tokens of a micro-batch in one attention layer, bytes: what each rank
/// along cp gathers with state passing. 0 where nothing is.
double gathered_keys_bytes(const StepOnRanks& layout);

}  // namespace heddle::plan
