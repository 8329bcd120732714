#include "models/qwen3_5/model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "device/require.h"
#include "nn/tensor_parallel.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/context_parallel/context_parallel.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rotary/rotary.h"

namespace heddle::models::qwen3_5 {

using comm::Dim;

namespace {

nn::AttentionDims attention_dims(const Config& config) {
  return {config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
          config.head_dim, config.rms_norm_eps};
}

nn::GatedDeltaNetDims gated_delta_net_dims(const Config& config) {
  return {
      config.hidden_size,         config.linear_num_key_heads,     config.linear_num_value_heads,
      config.linear_key_head_dim, config.linear_value_head_dim,    config.linear_conv_kernel_dim,
      config.rms_norm_eps,        config.interleaved_projections()};
}

Degrees degrees_of(const comm::Mesh& mesh, ops::ContextMethod method) {
  return {mesh.size(Dim::kTp), method == ops::ContextMethod::kUlysses ? mesh.size(Dim::kCp) : 1,
          mesh.size(Dim::kEp)};
}

}  // namespace

DecoderLayer::DecoderLayer(const Config& config, const std::string& prefix, std::int64_t index,
                           bool want_auxiliary_loss, std::int64_t ranks)
    : rms_norm_eps_(config.rms_norm_eps),
      want_auxiliary_loss_(want_auxiliary_loss),
      input_layernorm_(prefix + "input_layernorm.weight", {config.hidden_size}),
      post_attention_layernorm_(prefix + "post_attention_layernorm.weight", {config.hidden_size}) {
  for (nn::Parameter* norm : {&input_layernorm_, &post_attention_layernorm_})
    norm->set_partial_gradient();
  if (config.full_attention[index]) {
    attention_.emplace(prefix + "self_attn.", attention_dims(config), ranks);
  } else {
    gated_delta_net_.emplace(prefix + "linear_attn.", gated_delta_net_dims(config), ranks);
  }
  if (config.sparse_mlp[index]) {
    moe_.emplace(prefix + "mlp.",
                 nn::MoeDims{config.hidden_size, config.num_experts, config.num_experts_per_tok,
                             config.moe_intermediate_size, config.shared_expert_intermediate_size,
                             config.norm_topk_prob});
  } else {
    dense_.emplace(prefix + "mlp.", config.hidden_size, config.intermediate_size);
  }
}

nn::BlockOutput DecoderLayer::forward(std::size_t stage, const at::Tensor& hidden,
                                      const nn::BlockInputs& inputs) {
  if (stage == 1) return mlp(hidden, inputs);
  const auto [x, residual] = normalized(hidden, input_layernorm_, false, inputs);
  nn::BlockOutput output;
  output.hidden = nn::run_tensor_parallel(
      x, inputs, residual, [&](const nn::LinearInput& rows, const at::Tensor& own_residual) {
        return attention_ ? attention_->forward(rows, inputs, own_residual)
                          : gated_delta_net_->forward(rows, inputs, own_residual);
      });
  return output;
}

std::pair<nn::LinearInput, at::Tensor> DecoderLayer::normalized(
    const at::Tensor& hidden, const nn::Parameter& weight, bool is_kept,
    const nn::BlockInputs& inputs) const {
  at::Tensor residual;
  const auto norm = [&](const ops::OutputAgain& again) {
    auto [x, stream] =
        ops::rms_norm_branch(*inputs.kernels, hidden, weight.value(), rms_norm_eps_, again);
    residual = stream;
    return x;
  };
  // The ranks along tp keep what they gathered.
  is_kept |= !inputs.recompute_elementwise || inputs.tensor_group != nullptr;
  nn::LinearInput x = is_kept ? norm({}) : nn::LinearInput::made_again(norm);
  return {std::move(x), residual};
}

nn::BlockOutput DecoderLayer::mlp(const at::Tensor& hidden, const nn::BlockInputs& inputs) {
  const auto [x, residual] =
      normalized(hidden, post_attention_layernorm_, moe_.has_value(), inputs);
  nn::BlockOutput output;
  if (moe_) {
    output = moe_->forward(x.value, inputs, want_auxiliary_loss_);
    output.hidden = nn::add_to_residual(residual, output.hidden, inputs.output_unused);
  } else {
    output.hidden = dense_->forward(x, inputs, residual, inputs.output_unused);
  }
  return output;
}

at::Tensor DecoderLayer::generate(const at::Tensor& hidden, const nn::BlockInputs& inputs,
                                  nn::CacheView& cache) {
  const at::Tensor x =
      ops::rms_norm(*inputs.kernels, hidden, input_layernorm_.value(), rms_norm_eps_);
  const at::Tensor mixed = attention_ ? attention_->generate(x, inputs, cache)
                                      : gated_delta_net_->generate(x, inputs, cache);
  return mlp(hidden + mixed, inputs).hidden;
}

void DecoderLayer::visit_parameters(const std::function<void(nn::Parameter&)>& visit) {
  visit(input_layernorm_);
  if (attention_) attention_->visit_parameters(visit);
  if (gated_delta_net_) gated_delta_net_->visit_parameters(visit);
  visit(post_attention_layernorm_);
  if (dense_) dense_->visit_parameters(visit);
  if (moe_) moe_->visit_parameters(visit);
}

void DecoderLayer::visit_linears(const std::function<void(nn::Linear&)>& visit) {
  if (attention_) attention_->visit_linears(visit);
  if (gated_delta_net_) gated_delta_net_->visit_linears(visit);
  if (dense_) dense_->visit_linears(visit);
  if (moe_) moe_->visit_linears(visit);
}

void DecoderLayer::visit_expert_weights(const std::function<void(nn::ExpertWeights&)>& visit) {
  if (moe_) moe_->visit_expert_weights(visit);
}

Model::Model(Config config, std::string prefix, const runtime::Context& context,
             const ModelOptions& options)
    : config_(std::move(config)),
      prefix_(std::move(prefix)),
      context_(context),
      options_(options),
      kernels_(ops::KernelTable::choose(
          ops::builtin_registry(), context.device.type(), context.dtype,
          kernel_requests(config_, degrees_of(context.mesh, options.context_method)),
          options.kernel_policy)),
      tensor_group_(context.mesh.group({Dim::kTp})),
      context_group_(context.mesh.group({Dim::kCp})),
      expert_group_(context.mesh.group({Dim::kEp})),
      embed_tokens_(prefix_ + "embed_tokens.weight", {config_.vocab_size, config_.hidden_size}),
      norm_(prefix_ + "norm.weight", {config_.hidden_size}) {
  device::require_started(context.device, "a model");
  for (std::int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    layers_.push_back(
        std::make_unique<DecoderLayer>(config_, fmt::format("{}layers.{}.", prefix_, i), i,
                                       options.auxiliary_loss, context.mesh.size(Dim::kTp)));
  }
  if (options.head == Head::kLanguageModel && !config_.tie_word_embeddings) {
    lm_head_ =
        std::make_unique<nn::Linear>("lm_head.weight", config_.vocab_size, config_.hidden_size);
  }
  if (options.head == Head::kClassify) {
    if (options.num_labels < 1)
      throw_error<ConfigError>("model.num_labels must be at least 1 for model.head classify");
    score_ = std::make_unique<nn::Linear>("score.weight", options.num_labels, config_.hidden_size);
  }
  // The ranks along tp divide the rows of embedding and language-model head; other heads work on
  // the same last tokens.
  embed_tokens_.set_row_table();
  if (options.head == Head::kLanguageModel) {
    norm_.set_partial_gradient();
    head_weight().set_row_table();
  }
  visit_parameters([&](nn::Parameter& parameter) { parameter.place(context_.mesh); });
}

void Model::allocate() {
  visit_parameters(
      [&](nn::Parameter& parameter) { parameter.allocate(dtype_of(parameter), context_.device); });
}

c10::ScalarType Model::dtype_of(const nn::Parameter& parameter) const {
  const std::string& name = parameter.name();
  const bool wide = name.ends_with(".A_log") || name.ends_with(".dt_bias");
  return wide ? context_.wide_dtype() : context_.dtype;
}

void Model::visit_parameters(const std::function<void(nn::Parameter&)>& visit) {
  visit(embed_tokens_);
  for (const auto& layer : layers_) layer->visit_parameters(visit);
  visit(norm_);
  if (lm_head_) visit(lm_head_->weight());
  if (score_) visit(score_->weight());
}

std::vector<nn::Parameter*> Model::parameters() {
  std::vector<nn::Parameter*> all;
  visit_parameters([&](nn::Parameter& parameter) { all.push_back(&parameter); });
  return all;
}

void Model::visit_linears(const std::function<void(nn::Linear&)>& visit) {
  for (const auto& layer : layers_) layer->visit_linears(visit);
  if (lm_head_) visit(*lm_head_);
  if (score_) visit(*score_);
}

void Model::visit_expert_weights(const std::function<void(nn::ExpertWeights&)>& visit) {
  for (const auto& layer : layers_) layer->visit_expert_weights(visit);
}

nn::BlockInputs Model::block_inputs(ops::Sequences sequences, const at::Tensor& position_ids,
                                    std::int64_t real_tokens, bool training) const {
  nn::BlockInputs inputs;
  inputs.kernels = &kernels_;
  inputs.sequences = std::move(sequences);
  std::tie(inputs.cos, inputs.sin) = ops::rotary_tables(
      position_ids, config_.rotary_dim(), config_.rope_theta,
      position_ids.dim() == 2 ? config_.mrope_section : std::vector<std::int64_t>{},
      context_.dtype);
  if (tensor_group_.size() > 1) inputs.tensor_group = &tensor_group_;
  if (expert_group_.size() > 1) inputs.expert_group = &expert_group_;
  inputs.real_tokens = real_tokens;
  inputs.training = training;
  return inputs;
}

std::shared_ptr<const ops::ContextParallel> Model::context_of(
    const std::vector<std::int32_t>& cu_seqlens) const {
  if (context_group_.size() == 1) return nullptr;
  return std::make_shared<const ops::ContextParallel>(
      ops::ContextPlan(options_.context_method, cu_seqlens, context_group_.size(),
                       context_group_.rank()),
      context_group_, context_.device);
}

std::int64_t Model::padded_tokens(std::int64_t tokens) const {
  const std::int64_t segments =
      ops::ContextPlan::segments_of(options_.context_method, context_group_.size());
  if (tensor_group_.size() == 1) return std::max(tokens, segments);
  const std::int64_t step = segments * tensor_group_.size();
  return (tokens + step - 1) / step * step;
}

at::Tensor Model::embed(const at::Tensor& tokens) {
  const ops::Rows own = ops::own_rows(tokens.size(0), tensor_group_);
  return nn::embedding(kernels_, tokens.narrow(0, own.first, own.count), embed_tokens_);
}

at::Tensor Model::final_norm(const at::Tensor& hidden) {
  return ops::rms_norm(kernels_, hidden, norm_.value(), config_.rms_norm_eps);
}

nn::Parameter& Model::head_weight() { return lm_head_ ? lm_head_->weight() : embed_tokens_; }

at::Tensor Model::logits(const at::Tensor& normalized) {
  const ops::NoGradient guard;
  return kernels_.get<ops::Linear>().forward({{{normalized, head_weight().data()}}})[0];
}

std::vector<nn::LayerCache> Model::make_cache(std::int64_t slots, std::int64_t capacity) const {
  const auto options = at::TensorOptions().dtype(context_.dtype).device(context_.device);
  std::vector<nn::LayerCache> cache(layers_.size());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i]->is_full_attention()) {
      const std::vector<std::int64_t> shape = {slots, capacity, config_.num_key_value_heads,
                                               config_.head_dim};
      cache[i].keys = at::zeros(shape, options);
      cache[i].values = at::zeros(shape, options);
    } else {
      cache[i].conv = at::zeros({slots, gated_delta_net_dims(config_).conv_channels(),
                                 config_.linear_conv_kernel_dim - 1},
                                options);
      cache[i].state = at::zeros({slots, config_.linear_num_value_heads,
                                  config_.linear_key_head_dim, config_.linear_value_head_dim},
                                 options.dtype(context_.wide_dtype()));
    }
  }
  return cache;
}

at::Tensor Model::generate(const at::Tensor& tokens, const ops::Sequences& sequences,
                           std::vector<nn::LayerCache>& cache,
                           const std::vector<std::int64_t>& slots,
                           const std::vector<std::int64_t>& lengths) {
  const ops::NoGradient guard;
  at::Tensor positions = at::empty({tokens.size(0)}, at::kLong);
  std::int64_t* position = positions.mutable_data_ptr<std::int64_t>();
  for (std::int64_t s = 0; s < sequences.count(); ++s) {
    for (std::int64_t t = sequences.cu_seqlens_host[s]; t < sequences.cu_seqlens_host[s + 1]; ++t) {
      position[t] = lengths[s] + t - sequences.cu_seqlens_host[s];
    }
  }
  const nn::BlockInputs inputs =
      block_inputs(sequences, positions.to(context_.device), tokens.size(0), /*training=*/false);
  at::Tensor hidden = embed(tokens);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    nn::CacheView view{&cache[i], slots, lengths};
    hidden = layers_[i]->generate(hidden, inputs, view);
  }
  return hidden;
}

std::vector<ops::OpRequest> kernel_requests(const Config& config, const Degrees& degrees) {
  const std::int64_t head_ranks = degrees.tp * degrees.ulysses;
  const std::int64_t num_kv_heads =
      std::max<std::int64_t>(1, config.num_key_value_heads / degrees.tp);
  const ops::Dims hidden = {{"dim", config.hidden_size}};
  std::vector<ops::OpRequest> requests = {
      {"embedding", {{}}}, {"rms_norm", {hidden}}, {"linear", {{}}}};
  const auto any = [](const std::vector<bool>& flags, bool value) {
    return std::find(flags.begin(), flags.end(), value) != flags.end();
  };
  if (any(config.full_attention, false)) {
    requests.push_back({"gated_delta_rule",
                        {{{"num_k_heads", config.linear_num_key_heads / head_ranks},
                          {"num_v_heads", config.linear_num_value_heads / head_ranks},
                          {"head_k_dim", config.linear_key_head_dim},
                          {"head_v_dim", config.linear_value_head_dim}}}});
    requests.push_back(
        {"gdn_gates", {{{"num_v_heads", config.linear_num_value_heads / head_ranks}}}});
    requests.push_back({"gated_rms_norm", {{{"dim", config.linear_value_head_dim}}}});
    requests.push_back({"causal_conv1d",
                        {{{"channels", gated_delta_net_dims(config).conv_channels() / head_ranks},
                          {"width", config.linear_conv_kernel_dim}}}});
  }
  if (any(config.full_attention, true)) {
    const std::int64_t copies = nn::ulysses_key_copies(num_kv_heads, degrees.ulysses);
    const ops::Dims attention = {{"num_heads", config.num_attention_heads / head_ranks},
                                 {"num_kv_heads", num_kv_heads * copies / degrees.ulysses},
                                 {"head_dim", config.head_dim}};
    requests.push_back(
        {"qk_norm_rope", {{{"head_dim", config.head_dim}, {"rotary_dim", config.rotary_dim()}}}});
    requests.push_back({"attention", {attention}});
    requests.push_back({"output_gate", {attention}});
  }
  requests.push_back({"swiglu", {{{"dim", config.intermediate_size / degrees.tp}}}});
  if (any(config.sparse_mlp, true)) {
    requests.push_back(
        {"moe_route",
         {{{"num_experts", config.num_experts}, {"top_k", config.num_experts_per_tok}}}});
    requests.push_back({"moe_experts",
                        {{{"num_experts", config.num_experts / degrees.ep},
                          {"top_k", config.num_experts_per_tok},
                          {"hidden_size", config.hidden_size},
                          {"intermediate_size", config.moe_intermediate_size}}}});
  }
  requests.push_back({"linear_cross_entropy",
                      {{{"hidden_size", config.hidden_size}, {"vocab_size", config.vocab_size}}}});
  requests.push_back({"adamw", {{}}});
  return requests;
}

}  // namespace heddle::models::qwen3_5
