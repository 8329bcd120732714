#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "assembly/merged_adapter.h"
#include "config/run_config.h"
#include "models/config.h"

namespace heddle::plan {

inline double as_double(std::int64_t value) { return static_cast<double>(value); }

/// Where the head has more logits than this, it takes their rows in chunks, bytes
/// (ops/linear_cross_entropy/cuda).
inline double logits_bytes(bool is_trained) { return (is_trained ? 4.0 : 2.0) * (1u << 30); }

/// Cost of one token in one decoder layer. Elements are those that elementwise kernels read and
/// write; tensor parallelism divides all of them, tokens in the residual stream, elsewhere heads
/// and widths.
struct LayerWork {
  double products = 0;    ///< Weights that it is multiplied with; 2 FLOPs each way.
  double experts = 0;     ///< Cost of the routed experts.
  double attention = 0;   ///< FLOPs, forward and backward, per token of the sequence's length.
  double delta_rule = 0;  ///< FLOPs, forward and backward.
  double forward = 0, backward = 0;
  double again = 0;           ///< Elements that `recompute: elementwise` makes a second time.
  double adapters = 0;        ///< Elements that LoRA reads besides,
  double adapters_whole = 0;  ///< and of it the gathered rows, which tp does not divide.
  /// Weights of products, and of the experts' cost, that have gradients in a run.
  double trained_products = 0, trained_experts = 0;
};
/// Leaves trained_products and trained_experts, which a run decides, at 0.
LayerWork layer_work(const models::LayerShape& layer);

/// Elements of parameters of one layer.
struct ParameterCount {
  double divided = 0;     ///< Along tp.
  double replicated = 0;  ///< Along tp.
  double experts = 0;     ///< Along ep.

  double all() const { return divided + replicated + experts; }
  /// On one rank of the others' degrees 1.
  double dense(double tp) const { return divided / tp + replicated; }
  double on_rank(double tp, double ep) const { return dense(tp) + experts / ep; }
};

/// Memory that reinforcement learning takes besides a step's.
struct Generation {
  bool is_here = false;           ///< The ranks that train generate, too.
  bool gathers_weights = false;   ///< Whole on each rank while it generates.
  bool releases_caches = false;   ///< Before a batch is trained on.
  double sequences = 0;           ///< At the same time, on all data ranks.
  double capacity = 0, page = 1;  ///< Tokens of a sequence and of a page.
  double kept_states = 0;         ///< A data rank's, besides those of sequences.
  double state_element = 4;       ///< Bytes of a recurrent state's element.
  double memory_fraction = 0;     ///< Share of the free memory at most.
  double tp = 1, replicas = 1;    ///< Ranks that only generate.
  double pinned_sets = 0;         ///< Adapters besides the model's own (rl.update_mode pin).
};

/// One optimizer step of a run, whatever the layout.
struct Step {
  models::Config model;
  std::vector<LayerWork> layers;
  std::vector<ParameterCount> parameters;  ///< [layer]
  std::vector<ParameterCount> adapters;    ///< [layer]; zeros where there are none.
  std::vector<ParameterCount> trained;     ///< [layer] Elements of both that are trained.
  /// [layer] Matrices with adapters, which rollout.merge_adapter has twice; zeros without it.
  std::vector<ParameterCount> adapted;
  std::vector<assembly::MergedParameter> merged;  ///< Empty without it.
  std::int64_t first_trained = 0;  ///< Layers below it have no backward, nor the embedding.
  bool has_logits = true;          ///< The head is a language model's.
  /// Elements; the head is 0 where it is tied or there are no logits.
  double embedding = 0, head = 0, trained_embedding = 0, trained_head = 0;
  double classifier = 0, trained_classifier = 0;  ///< Elements of the head of a classifier.
  double length = 0, rows = 0;  ///< Length of the sequences, and how many in a step.
  double micro_batch_tokens = 0;
  bool is_lora = false;
  double element = 2, wide = 4, gradient = 4;            ///< Bytes.
  double state = 12;                                     ///< Bytes of the optimizer for an element.
  bool offloads_state = false, offloads_inputs = false;  ///< Apply to recomputed blocks.
  std::optional<Generation> generation;                  ///< Where a policy is trained.
  bool has_critic = false, has_frozen_reference = false;
  bool has_kept_reference = false;  ///< A copy of what is trained, divided as its owners.
  /// From which block on the outputs of linear layers are products of 8-bit floats, as are their
  /// input gradients in all blocks (kernels.fp8, kernels.linear); none: of 16-bit ones.
  std::optional<std::int64_t> first_eight_bit_block;
  /// A rank that has them whole keeps frozen routed experts in 8-bit floats (kernels.fp8,
  /// kernels.frozen_experts): those of the policy or of what else is trained, by itself and in a
  /// job of several, and those of the critic.
  bool has_eight_bit_experts = false, has_eight_bit_experts_on_ranks = false,
       has_eight_bit_critic = false;

  double vocabulary_elements() const {
    return static_cast<double>(model.vocab_size * model.hidden_size);
  }
  bool has_tied_head() const { return has_logits && head == 0; }
  /// The weight that logits are made with has a gradient.
  bool trains_logits() const {
    return has_logits && (has_tied_head() ? trained_embedding : trained_head) > 0;
  }
};
/// Throws ConfigError where kernels.frozen_experts names a form that a run of so many training
/// ranks refuses (assembly/frozen_experts.h), in the same words.
void require_frozen_experts(const config::RunConfig& config, const models::Config& model,
                            std::int64_t world);

/// Throws ConfigError where rollout.merge_adapter does not do on the ranks that generate: those of
/// `training`, or of rl.rollout_ranks, in the words of a run.
void require_merged_adapter(const config::RunConfig& config, const Step& step,
                            const comm::Mesh& training);

/// Whether ranks that have their experts whole, with GPUs that have the kernels, keep frozen ones
/// in 8-bit floats. A form that is named and does not do counts as if it did.
bool keeps_experts_in_eight_bits(const config::RunConfig& config, const models::Config& model,
                                 bool is_job_of_several_ranks);

/// For steps of full rows (data.max_length tokens). Throws ConfigError for targets of adapters, and
/// names of what is trained or is not, that a start refuses.
Step describe_step(const config::RunConfig& config, const models::Config& model);

}  // namespace heddle::plan
