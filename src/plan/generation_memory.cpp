#include "plan/generation_memory.h"

#include <algorithm>
#include <cmath>
#include <ranges>

namespace heddle::plan {
namespace {

using comm::Dim;

/// Ranks that generate, as far as caches go.
struct Generating {
  double tp = 1, data = 1;  ///< Degree of tp, and data ranks that divide the sequences.
};

/// Caches of these layers, of as many sequences of full length as a data rank has. Slots and pages
/// as rollout/pool_size.cpp counts them.
double caches_of(const Step& step, const Generating& ranks, const auto& layers) {
  const Generation& g = *step.generation;
  const double sequences = std::ceil(g.sequences / ranks.data);
  const double slots = sequences + g.kept_states + std::max(1.0, ranks.tp);
  const double tokens = (sequences * std::ceil(g.capacity / g.page) + 1) * g.page;
  double bytes = 0;
  for (const std::int64_t i : layers) {
    const models::LayerShape& layer = step.model.layers[static_cast<std::size_t>(i)];
    if (layer.attention) {
      // With more ranks along tp than heads each has one.
      const double heads =
          std::max(1.0, as_double(layer.attention->num_key_value_heads) / ranks.tp);
      bytes += tokens * 2 * heads * as_double(layer.attention->head_dim) * step.element;
    }
    if (layer.gated_delta_net) {
      const nn::GatedDeltaNetDims& dims = *layer.gated_delta_net;
      const double state = as_double(dims.value_dim() * dims.key_head_dim) * g.state_element;
      const double conv = as_double(dims.conv_channels() * (dims.conv_kernel - 1)) * step.element;
      bytes += slots * (state + conv) / ranks.tp;
    }
  }
  return bytes;
}

/// Elements that ranks divide and have whole while they generate, beside their shares: all of them,
/// or embedding and head, the block that runs and the next one (rollout/engine.cpp). Experts in 8
/// bits are one rank's, which gathers none.
double gathered_to_generate(const StepOnRanks& layout, const Held& held) {
  const bool has_all = layout.step->generation->gathers_weights;
  double elements = layout.table_shards() > 1 ? held.tables : 0;
  const double sets = 1 + layout.pinned_sets();
  const double dense = held.dense + sets * held.adapters,
               experts = held.experts + sets * held.expert_adapters;
  if (layout.shards() > 1)
    elements += has_all ? dense : std::min(dense, 2 * held.largest_dense_block);
  if (layout.expert_shards() > 1)
    elements += has_all ? experts : std::min(experts, 2 * held.largest_expert_block);
  return elements;
}

/// Logits of one token of each sequence, in fp32 where they are drawn from.
double logits_of_draws(const Step& step, const Generating& ranks) {
  return 4 * std::ceil(step.generation->sequences / ranks.data) * as_double(step.model.vocab_size);
}

}  // namespace

void add_generation(const StepOnRanks& layout, std::int64_t stage_rank, const Owned& owned,
                    double device, Memory& memory) {
  const Step& step = *layout.step;
  const Generation& g = *step.generation;
  if (step.has_critic) {
    // Its own weights, moments and gradients; its activations come when the policy's are gone.
    memory.others += owned.critic + (step.state + step.gradient) * owned.trained_critic;
  }
  if (step.has_frozen_reference) memory.others += owned.reference;
  if (step.has_kept_reference) memory.others += step.element * owned.trained;
  memory.peak += memory.others;
  if (!g.is_here) return;
  const Generating ranks{layout.size(Dim::kTp), as_double(layout.mesh.data_size())};
  memory.caches = caches_of(step, ranks, layout.stages.layers_of(stage_rank));
  // The engine is made before the first step, which makes the moments.
  const double placed = owned.weights + memory.others;
  if (device > 0) memory.caches = std::min(memory.caches, g.memory_fraction * (device - placed));
  memory.caches = std::max(0.0, memory.caches);
  const Held held = held_by(layout, stage_rank);
  // The engine has the sums of an adapter, or sets of it, for as long as it lives, which is longer
  // than its caches.
  memory.merged = step.element * held.merged;
  memory.pinned = layout.pinned_sets() * owned.adapters;
  memory.peak += memory.merged + memory.pinned;
  memory.generating = owned.weights + step.element * gathered_to_generate(layout, held) +
                      memory.merged + memory.pinned + memory.optimizer + memory.others +
                      memory.caches;
  if (layout.has_head(stage_rank)) memory.generating += logits_of_draws(step, ranks);
  if (!g.releases_caches) memory.peak += memory.caches;
  memory.peak = std::max(memory.peak, memory.generating);
}

RolloutMemory rollout_memory(const Step& step, double device) {
  const Generation& g = *step.generation;
  RolloutMemory memory;
  double elements = step.embedding + step.head;
  for (const auto* counts : {&step.parameters, &step.adapters}) {
    for (const ParameterCount& count : *counts) elements += count.on_rank(g.tp, g.tp);
  }
  memory.weights = step.element * elements;
  const Generating ranks{.tp = g.tp, .data = g.replicas};
  memory.caches =
      caches_of(step, ranks, std::views::iota(std::int64_t{0}, step.model.num_hidden_layers()));
  if (device > 0)
    memory.caches = std::clamp(g.memory_fraction * (device - memory.weights), 0.0, memory.caches);
  // Made after the caches.
  for (const ParameterCount& count : step.adapted)
    memory.weights += step.element * count.on_rank(g.tp, g.tp);
  for (const ParameterCount& count : step.adapters)
    memory.weights += g.pinned_sets * step.element * count.on_rank(g.tp, g.tp);
  return memory;
}

}  // namespace heddle::plan
