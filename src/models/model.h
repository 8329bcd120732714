#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/group.h"
#include "models/config.h"
#include "models/decoder_layer.h"
#include "models/head.h"
#include "models/kernel_requests.h"
#include "models/unit.h"
#include "nn/block.h"
#include "nn/cache.h"
#include "nn/linear.h"
#include "ops/context_parallel/plan.h"
#include "ops/registry.h"
#include "ops/sequences.h"
#include "runtime/context.h"

namespace heddle::models {

struct ModelOptions {
  Head head = Head::kLanguageModel;
  std::int64_t num_labels = 0;  ///< kClassify: 1 = regression or reward.
  Duties duties;                ///< They decide which kernels are chosen.
  bool auxiliary_loss = false;  ///< Compute the router's load-balancing loss while training.
  ops::KernelPolicy kernel_policy;
  ops::ContextMethod context_method = ops::ContextMethod::kState;  ///< Where cp is above 1.
};

/// The text model with one head. Parameters have names and shapes from the start, storage after
/// allocate().
class Model {
 public:
  /// `prefix` is how the checkpoint names the text model ("model." or "model.language_model.").
  /// Chooses the kernels.
  Model(Config config, std::string prefix, const runtime::Context& context,
        const ModelOptions& options);
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const Config& config() const { return config_; }
  const std::string& prefix() const { return prefix_; }
  const runtime::Context& context() const { return context_; }
  const ops::KernelTable& kernels() const { return kernels_; }
  Head head() const { return options_.head; }
  std::int64_t num_labels() const { return options_.num_labels; }

  /// Gives every parameter storage, uninitialised.
  void allocate();
  /// The model's dtype; A_log and dt_bias have fp32 at least.
  c10::ScalarType dtype_of(const nn::Parameter& parameter) const;
  /// Random weights as transformers draws them (normal, std initializer_range; A_log = log U(0.01,
  /// 16); dt_bias = 1; norms neutral), keyed by seed, name and index. `names` empty: all.
  void initialize(std::uint64_t seed, const std::vector<std::string>& names = {});

  /// A pass runs these in order: the embedding, the layers, final norm with the head. A tied head
  /// reads the embedding's unit.
  const std::vector<Unit>& units() const { return units_; }
  /// By unit; each parameter once.
  void visit_parameters(const std::function<void(nn::Parameter&)>& visit);
  std::vector<nn::Parameter*> parameters();
  /// Every projection, the language model or classification head included; a tied head too, whose
  /// weight is the embedding's.
  void visit_linears(const std::function<void(nn::Linear&)>& visit);
  /// The routed experts of every sparse layer.
  void visit_expert_weights(const std::function<void(nn::ExpertWeights&)>& visit);

  // The pieces of a forward pass, in order; the block runner drives the layers.
  /// How the ranks along cp share a batch of these boundaries; null if this rank has all tokens.
  std::shared_ptr<const ops::ContextParallel> context_of(
      const std::vector<std::int32_t>& cu_seqlens) const;
  /// How many tokens a batch of so many must be padded to: every rank along cp has some of them,
  /// and all ranks along tp have equally many rows.
  std::int64_t padded_tokens(std::int64_t tokens) const;
  /// cos and sin of positions [T] or [3,T], see ops::rotary_tables.
  std::pair<at::Tensor, at::Tensor> rotary(const at::Tensor& position_ids) const;
  /// A pass over whole sequences.
  nn::Pass pass(ops::Sequences sequences, const at::Tensor& position_ids, std::int64_t real_tokens,
                bool training) const;
  /// A pass that continues the sequences of a cache by packed tokens, without gradients.
  nn::Pass cached_pass(ops::Sequences sequences, nn::CachedSequences cached) const;
  /// tokens [T]; hidden states of this rank's rows [T/tp,H].
  at::Tensor embed(const at::Tensor& tokens);
  std::vector<std::unique_ptr<DecoderLayer>>& layers() { return layers_; }
  at::Tensor final_norm(const at::Tensor& hidden);
  /// The ranks along tp, which share the rows of hidden states, T/tp each in order.
  const comm::Group& tensor_group() const { return tensor_group_; }
  nn::Parameter& embedding_weight() { return embed_tokens_; }
  /// [vocab, H]: the head's weight, or the embedding if tied.
  nn::Parameter& head_weight();
  bool tied() const { return config_.tie_word_embeddings; }
  /// Projection of a classification head [num_labels, H].
  nn::Linear& score() { return *score_; }
  /// The language-model head as a layer; null if the head is another.
  nn::Linear* lm_head() { return lm_head_.get(); }

  /// Logits [N,V] of rows of normalised hidden states, without gradient, each row's changed by its
  /// adapters: as nn::Pass has them, of all N rows.
  at::Tensor logits(const at::Tensor& normalized, const std::vector<nn::AdaptedRows>& adapters = {},
                    const nn::RowAdapters* row_adapters = nullptr);

  /// Memory for sequences, zero: of this rank's layers and heads.
  nn::Cache make_cache(const nn::CacheSize& size) const;

 private:
  std::vector<Unit> make_units();
  /// A pass but for its cos and sin.
  nn::Pass pass_without_positions(ops::Sequences sequences, std::int64_t real_tokens,
                                  bool training) const;

  Config config_;
  std::string prefix_;
  runtime::Context context_;
  ModelOptions options_;
  ops::KernelTable kernels_;
  comm::Group tensor_group_, context_group_, expert_group_;
  nn::Parameter embed_tokens_;
  std::vector<std::unique_ptr<DecoderLayer>> layers_;
  nn::Parameter norm_;
  std::unique_ptr<nn::Linear> lm_head_, score_;
  std::vector<Unit> units_;
};

}  // namespace heddle::models
