#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "models/qwen3_5/config.h"
#include "nn/attention.h"
#include "nn/block.h"
#include "nn/cache.h"
#include "nn/gated_delta_net.h"
#include "nn/linear.h"
#include "nn/mlp.h"
#include "ops/context_parallel/plan.h"
#include "ops/registry.h"
#include "ops/sequences.h"
#include "runtime/context.h"

namespace heddle::models::qwen3_5 {

/// What stands on the trunk.
enum class Head { kLanguageModel, kClassify, kEmbed };

/// One decoder layer: h += mixer(norm(h)); h += mlp(norm(h)).
class DecoderLayer : public nn::Block {
 public:
  /// `ranks` along tp share the layer.
  DecoderLayer(const Config& config, const std::string& prefix, std::int64_t index,
               bool want_auxiliary_loss, std::int64_t ranks = 1);

  std::size_t stages() const override { return 2; }
  nn::BlockOutput forward(std::size_t stage, const at::Tensor& hidden,
                          const nn::BlockInputs& inputs) override;
  at::Tensor generate(const at::Tensor& hidden, const nn::BlockInputs& inputs,
                      nn::CacheView& cache);
  void visit_parameters(const std::function<void(nn::Parameter&)>& visit) override;
  void visit_linears(const std::function<void(nn::Linear&)>& visit);
  void visit_expert_weights(const std::function<void(nn::ExpertWeights&)>& visit);
  bool is_full_attention() const { return attention_.has_value(); }

 private:
  nn::BlockOutput mlp(const at::Tensor& hidden, const nn::BlockInputs& inputs);
  /// The normalised hidden states as the projections read them, and the residual stream. `is_kept`:
  /// what reads them keeps them in any case, as experts do.
  std::pair<nn::LinearInput, at::Tensor> normalized(const at::Tensor& hidden,
                                                    const nn::Parameter& weight, bool is_kept,
                                                    const nn::BlockInputs& inputs) const;

  double rms_norm_eps_;
  bool want_auxiliary_loss_;
  nn::Parameter input_layernorm_, post_attention_layernorm_;
  std::optional<nn::Attention> attention_;
  std::optional<nn::GatedDeltaNet> gated_delta_net_;
  std::optional<nn::Mlp> dense_;
  std::optional<nn::Moe> moe_;
};

struct ModelOptions {
  Head head = Head::kLanguageModel;
  std::int64_t num_labels = 0;  ///< kClassify: 1 = regression or reward.
  bool generates = false;       ///< It will generate: kernels that decode are chosen too.
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

  void visit_parameters(const std::function<void(nn::Parameter&)>& visit);
  std::vector<nn::Parameter*> parameters();
  /// Every projection, the language model or classification head included.
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
  nn::BlockInputs block_inputs(ops::Sequences sequences, const at::Tensor& position_ids,
                               std::int64_t real_tokens, bool training) const;
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
  /// The untied head as a layer; null if tied or another head.
  nn::Linear* lm_head() { return lm_head_.get(); }

  /// Logits [N, V] of rows of normalised hidden states, without gradient.
  at::Tensor logits(const at::Tensor& normalized);

  /// Memory for `slots` sequences of up to `capacity` tokens, zero.
  std::vector<nn::LayerCache> make_cache(std::int64_t slots, std::int64_t capacity) const;
  /// Continues the sequences of `slots` by the packed tokens and returns hidden states [T,H] before
  /// the final norm.
  at::Tensor generate(const at::Tensor& tokens, const ops::Sequences& sequences,
                      std::vector<nn::LayerCache>& cache, const std::vector<std::int64_t>& slots,
                      const std::vector<std::int64_t>& lengths);

 private:
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
};

/// How many ranks share the parts of a model.
struct Degrees {
  std::int64_t tp = 1;       ///< Heads and widths of each block.
  std::int64_t ulysses = 1;  ///< Heads of each further, while they mix tokens.
  std::int64_t ep = 1;       ///< Routed experts.
};

/// Which operators the model calls, and with which dimensions on each rank; those that decode if it
/// `generates`.
std::vector<ops::OpRequest> kernel_requests(const Config& config, const Degrees& degrees = {},
                                            bool generates = false);

}  // namespace heddle::models::qwen3_5
