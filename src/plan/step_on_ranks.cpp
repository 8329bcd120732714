#include "plan/step_on_ranks.h"

#include <algorithm>
#include <cmath>

#include "assembly/from_config.h"
#include "ops/moe/expert_parallel.h"
#include "parallel/layout.h"
#include "parallel/sharding.h"
#include "plan/generation_memory.h"
#include "train/describe.h"

namespace heddle::plan {
namespace {

using comm::Dim;

/// A mesh that the model can be divided by.
comm::Mesh checked_mesh(const Step& step, const config::RunConfig& config, std::int64_t world) {
  comm::Mesh mesh(assembly::mesh_sizes(config.parallel, world), 0, world, config.parallel.ep);
  parallel::check_layout(mesh, step.model, config.parallel.cp_method,
                         assembly::stage_chunks(config));
  require_merged_adapter(config, step, mesh);
  return mesh;
}

}  // namespace

StepOnRanks::StepOnRanks(const Step& of, const config::RunConfig& config, std::int64_t world)
    : step(&of),
      mesh(checked_mesh(of, config, world)),
      stages(parallel::StagePlan::balanced(of.model, mesh.size(Dim::kPp),
                                           assembly::stage_chunks(config))),
      method(config.parallel.cp_method),
      recompute(config.train.recompute.value_or(parallel::Recompute::kFull)),
      sums_every_micro_batch(config.parallel.sum_gradients == parallel::Summing::kMicroBatch) {
  const double rows = std::ceil(of.rows / as_double(mesh.data_size()));
  micro_batches = std::ceil(rows * of.length / of.micro_batch_tokens);
  tokens = rows * of.length / micro_batches / size(Dim::kCp);
}

double StepOnRanks::expert_ranks() const {
  const nn::MoeDims* moe = step->model.moe();
  if (moe == nullptr) return 0;
  return ops::expected_expert_ranks(moe->num_experts, moe->num_experts_per_tok,
                                    mesh.size(Dim::kEp));
}

Held held_by(const StepOnRanks& layout, std::int64_t stage_rank) {
  const Step& step = *layout.step;
  const double tp = layout.size(Dim::kTp), ep = layout.size(Dim::kEp);
  const double sets = 1 + layout.pinned_sets();
  Held held;
  for (const std::int64_t i : layout.stages.layers_of(stage_rank)) {
    const ParameterCount &count = step.parameters[i], &adapters = step.adapters[i];
    held.trained_dense += step.trained[i].dense(tp);
    held.trained_experts += step.trained[i].experts / ep;
    if (step.trained[i].all() > 0) ++held.trained_blocks;
    const double dense = count.dense(tp), experts = count.experts / ep;
    const double beside = adapters.dense(tp), beside_experts = adapters.experts / ep;
    held.dense += dense;
    held.experts += experts;
    held.adapters += beside;
    held.expert_adapters += beside_experts;
    held.merged += step.adapted[i].on_rank(tp, ep);
    held.largest_dense_block = std::max(held.largest_dense_block, dense + sets * beside);
    held.largest_expert_block =
        std::max(held.largest_expert_block, experts + sets * beside_experts);
  }
  if (layout.has_embedding(stage_rank)) {
    held.tables += step.embedding;
    held.trained_tables += step.trained_embedding;
  }
  if (layout.has_head(stage_rank)) {
    held.tables += step.head;
    held.trained_tables += step.trained_head;
    held.trained_classifier = step.trained_classifier;
  }
  held.largest_table = held.tables > 0 ? step.vocabulary_elements() : 0;
  const bool makes_logits = step.has_logits && layout.has_head(stage_rank);
  held.gathered_tables = ((stage_rank == 0 ? 1 : 0) + (makes_logits ? 1 : 0)) * held.largest_table;
  return held;
}

namespace {

/// Elements whose state the device holds at a time where it is offloaded (train/state_offload.h).
constexpr double kStateOnDevice = 4 * (1 << 23);

/// Bytes of the head: logits, the gradient of its weight in fp32 where chunks add to it, and its
/// rows with their gradients. Other heads read the last tokens of texts, which are not counted.
double head_bytes(const StepOnRanks& layout) {
  const Step& step = *layout.step;
  if (!step.has_logits) return 0;
  const double rows = layout.tokens / layout.size(Dim::kTp);
  const double logits = rows * as_double(step.model.vocab_size) * step.element;
  const bool is_trained = step.trains_logits();
  double bytes = std::min(logits, logits_bytes(is_trained));
  bytes += 3 * rows * as_double(step.model.hidden_size) * step.element;
  if (is_trained && step.gradient < 4 && logits > logits_bytes(is_trained))
    bytes += 4 * step.vocabulary_elements();
  return bytes;
}

/// Temporaries of one block's backward: gradients of its widest operator, or the states of the
/// gated delta rule at every 64th token.
double block_bytes(const StepOnRanks& layout) {
  const auto& model = layout.step->model;
  double width = 0, state = 0;
  for (const models::LayerShape& layer : model.layers)
    width = std::max(width, as_double(layer.active_width()));
  if (const nn::GatedDeltaNetDims* dims = model.gated_delta_net())
    state = as_double(dims->value_dim() * dims->key_head_dim);
  const double per_token = std::max(4 * width, 2 * state / 64) / layout.size(Dim::kTp) +
                           3 * as_double(model.hidden_size);
  // Keys and values as they come and as they are read, and their gradients.
  return std::max(layout.tokens * per_token * layout.step->element,
                  3 * gathered_keys_bytes(layout));
}

/// Of the block that runs again as a whole: what it keeps for its backward, where the gradients of
/// the MLP take the place of one of its widths.
double block_again_bytes(const StepOnRanks& layout, std::int64_t stage_rank) {
  const auto& model = layout.step->model;
  if (layout.recompute != parallel::Recompute::kFull) return 0;
  double largest = 0;
  for (const std::int64_t i : layout.stages.layers_of(stage_rank)) {
    const double tp = layout.size(Dim::kTp);
    const double kept = train::kept_elements(model.layers[i], parallel::Recompute::kElementwise,
                                             /*offloads_inputs=*/false, layout.mesh.size(Dim::kTp));
    const double width = as_double(model.layers[i].active_width());
    largest = std::max(largest, kept - width / tp);
  }
  return layout.tokens * largest * layout.step->element;
}

bool is_accumulated(const StepOnRanks& layout) {
  return layout.micro_batches * as_double(layout.stages.chunks) > 1;
}

/// Of all that is trained; `owned` elements are the rank's own.
double gradient_bytes(const StepOnRanks& layout, const Held& held, double owned) {
  const double whole =
      held.trained_dense + held.trained_experts + held.trained_tables + held.trained_classifier;
  double elements = whole;
  if (!is_accumulated(layout) || layout.sums_every_micro_batch) {
    // Whole until their sum is there.
    const double units = static_cast<double>(parallel::Sharding::kUnitsUnderWay) + 1;
    const double blocks = as_double(std::max<std::int64_t>(1, held.trained_blocks));
    const double block = (held.trained_dense + held.trained_experts) / blocks;
    const double table = held.trained_tables > 0 ? held.largest_table : 0;
    elements = std::min(whole, owned + units * block + table);
  }
  return layout.step->gradient * elements;
}

double activation_bytes(const StepOnRanks& layout, std::int64_t stage_rank) {
  const Step& step = *layout.step;
  const bool keeps_mlp = layout.recompute == parallel::Recompute::kOff ||
                         layout.recompute == parallel::Recompute::kElementwise;
  double elements = 0;
  for (const std::int64_t i : layout.stages.layers_of(stage_rank)) {
    if (i < step.first_trained) continue;
    elements += train::kept_elements(step.model.layers[i], layout.recompute, step.offloads_inputs,
                                     layout.mesh.size(Dim::kTp));
    // The rows that experts received.
    if (step.model.layers[i].moe && keeps_mlp && layout.size(Dim::kEp) > 1) {
      elements += layout.expert_ranks() * as_double(step.model.hidden_size) / layout.size(Dim::kTp);
    }
    // Keys and values of the other ranks along cp.
    if (step.model.layers[i].attention && layout.recompute != parallel::Recompute::kFull) {
      elements += gathered_keys_bytes(layout) / layout.tokens / step.element *
                  (1 - 1 / layout.size(Dim::kCp));
    }
  }
  const double in_flight = layout.stages.most_in_flight(stage_rank, layout.micro_batches);
  double bytes = layout.tokens * elements * step.element * in_flight;
  if (step.offloads_inputs) {
    bytes += layout.tokens * step.element / layout.size(Dim::kTp) *
             as_double(parallel::kOffloadedInputsOnDevice * step.model.hidden_size);
  }
  return bytes;
}

/// A rank's share of embedding and head, elements.
struct Tables {
  double held = 0;
  double trained = 0;  ///< Elements that it updates.

  /// Bytes; values that stay whole have their owned rows besides.
  double bytes(const StepOnRanks& layout) const {
    const bool has_rows_besides = layout.table_shards() == 1 && layout.size(Dim::kDp) > 1;
    return layout.step->element * (held + (has_rows_besides ? trained : 0));
  }
};

/// Adds the head of a classifier, whose rows are divided as dense parameters but not along tp.
void add_classifier(Tables& tables, const StepOnRanks& layout, double elements, double trained) {
  const double width = as_double(layout.step->model.hidden_size);
  const double shards = layout.shards(), replicas = layout.size(Dim::kDp);
  const double owned = width * std::ceil(elements / width / shards / replicas);
  tables.held += shards > 1 ? replicas * owned : elements;
  tables.trained += trained > 0 ? owned : 0;
}

Tables tables_of_step(const StepOnRanks& layout, const Held& held, std::int64_t stage_rank) {
  const double shards = layout.table_shards();
  Tables tables = {held.tables / shards, held.trained_tables / shards / layout.size(Dim::kDp)};
  if (layout.has_head(stage_rank))
    add_classifier(tables, layout, layout.step->classifier, layout.step->trained_classifier);
  return tables;
}

/// A critic's head makes one number of a hidden state, is one row, and is trained beside adapters
/// too (rl/critic.h).
Tables tables_of_critic(const StepOnRanks& layout, std::int64_t stage_rank) {
  const Step& step = *layout.step;
  Tables tables;
  if (stage_rank == 0) {
    tables.held = step.embedding / layout.table_shards();
    if (!step.is_lora) tables.trained = tables.held / layout.size(Dim::kDp);
  }
  const double head = as_double(step.model.hidden_size);
  if (layout.has_head(stage_rank)) add_classifier(tables, layout, head, head);
  return tables;
}

/// A rank's share of the blocks with their adapters.
struct Blocks {
  double bytes = 0;  ///< Values that stay whole have their owned rows besides.
  double owned = 0;  ///< Elements that it updates.
};

/// `bytes`: of the values; `dense`, `experts`: elements that are trained, after tp and ep.
Blocks blocks_of(const StepOnRanks& layout, double bytes, double dense, double experts) {
  const double element = layout.step->element;
  const double owned_dense = dense / layout.shards() / layout.size(Dim::kDp),
               owned_experts = experts / layout.expert_shards() / layout.size(Dim::kEdp);
  if (layout.shards() == 1 && layout.size(Dim::kDp) > 1) bytes += element * owned_dense;
  if (layout.expert_shards() == 1 && layout.size(Dim::kEdp) > 1) bytes += element * owned_experts;
  return {bytes, owned_dense + owned_experts};
}

/// A critic's, which trains all that train.method lets it.
Blocks blocks_of_critic(const StepOnRanks& layout, double bytes, const Held& held) {
  return layout.step->is_lora ? blocks_of(layout, bytes, held.adapters, held.expert_adapters)
                              : blocks_of(layout, bytes, held.dense, held.experts);
}

}  // namespace

double gathered_keys_bytes(const StepOnRanks& layout) {
  if (layout.size(Dim::kCp) == 1 || layout.method != ops::ContextMethod::kState) return 0;
  const nn::AttentionDims* attention = layout.step->model.attention();
  if (attention == nullptr) return 0;
  // With more ranks along tp than heads each has one.
  const double heads =
      std::max(1.0, as_double(attention->num_key_value_heads) / layout.size(Dim::kTp));
  return layout.tokens * layout.size(Dim::kCp) * 2 * heads * as_double(attention->head_dim) *
         layout.step->element;
}

Memory memory_of(const StepOnRanks& layout, std::int64_t stage_rank, double device) {
  const Step& step = *layout.step;
  const Held held = held_by(layout, stage_rank);
  const double shards = layout.shards(), expert_shards = layout.expert_shards(),
               table_shards = layout.table_shards();
  Memory memory;
  const Tables tables = tables_of_step(layout, held, stage_rank),
               critic_tables = tables_of_critic(layout, stage_rank);
  const double of_experts = held.experts / expert_shards,
               loaded_blocks = step.element * (held.dense / shards + of_experts);
  // The scale of each expert is not counted.
  const double by_eight_bits =
      assembly::has_whole_experts(layout.mesh) ? (step.element - 1) * of_experts : 0;
  const double of_adapters =
      step.element * (held.adapters / shards + held.expert_adapters / expert_shards);
  const Blocks blocks = blocks_of(layout, loaded_blocks + of_adapters, held.trained_dense,
                                  held.trained_experts),
               critic_blocks = blocks_of_critic(layout, loaded_blocks + of_adapters, held);
  const double between =
      blocks.bytes + tables.bytes(layout) - (layout.has_eight_bit_experts() ? by_eight_bits : 0);
  const double owned = blocks.owned + tables.trained;
  // The block that runs and the next one, or the table before or after it.
  const double block_gathered = held.largest_dense_block * (1 - 1 / shards);
  const double table_gathered = held.largest_table * (1 - 1 / table_shards);
  memory.weights =
      between + step.element * (block_gathered + std::max(block_gathered, table_gathered));
  if (expert_shards > 1)
    memory.weights += step.element * 2 * held.largest_expert_block * (1 - 1 / expert_shards);
  memory.gradients = gradient_bytes(layout, held, owned);
  memory.optimizer = step.state * (step.offloads_state ? std::min(owned, kStateOnDevice) : owned);
  memory.activations = activation_bytes(layout, stage_rank);
  const double resident = memory.weights + memory.optimizer;
  const double block = block_bytes(layout) + block_again_bytes(layout, stage_rank);
  const double head = layout.has_head(stage_rank) ? head_bytes(layout) : 0;
  memory.working = std::max(block, head);
  // The gradients of the first micro-batch come as its activations go.
  const double of_head =
      head > 0 && step.trains_logits() ? step.gradient * step.vocabulary_elements() : 0;
  const double before = !is_accumulated(layout)         ? of_head
                        : layout.sums_every_micro_batch ? step.gradient * owned + of_head
                                                        : memory.gradients;
  memory.peak =
      resident + std::max(memory.activations + before + memory.working, memory.gradients + block);
  if (step.generation) {
    const Owned parts = {.weights = between,
                         .adapters = of_adapters,
                         .critic = critic_blocks.bytes + critic_tables.bytes(layout) -
                                   (step.has_eight_bit_critic ? by_eight_bits : 0),
                         .reference = loaded_blocks + step.element * tables.held,
                         .trained = owned,
                         .trained_critic = critic_blocks.owned + critic_tables.trained};
    add_generation(layout, stage_rank, parts, device, memory);
  }
  // Experts come as they are stored, and all of a model are there before the first is converted;
  // a critic's come after the policy's.
  memory.peak = std::max(memory.peak, loaded_blocks + step.element * tables.held);
  if (step.has_critic)
    memory.peak =
        std::max(memory.peak, between + loaded_blocks + step.element * critic_tables.held);
  return memory;
}

}  // namespace heddle::plan
