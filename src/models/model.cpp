#include "models/model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "device/require.h"
#include "device/upload.h"
#include "nn/row_adapters.h"
#include "nn/tensor_parallel.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/context_parallel/context_parallel.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rotary/rotary.h"

namespace heddle::models {

using comm::Dim;

namespace {

Degrees degrees_of(const comm::Mesh& mesh, ops::ContextMethod method) {
  return {mesh.size(Dim::kTp), method == ops::ContextMethod::kUlysses ? mesh.size(Dim::kCp) : 1,
          mesh.size(Dim::kEp)};
}

}  // namespace

Model::Model(Config config, std::string prefix, const runtime::Context& context,
             const ModelOptions& options)
    : config_(std::move(config)),
      prefix_(std::move(prefix)),
      context_(context),
      options_(options),
      kernels_(ops::KernelTable::choose(
          ops::builtin_registry(), ops::target_of(context.device), context.dtype,
          kernel_requests(config_, degrees_of(context.mesh, options.context_method),
                          options.duties),
          options.kernel_policy)),
      tensor_group_(context.mesh.group({Dim::kTp})),
      context_group_(context.mesh.group({Dim::kCp})),
      expert_group_(context.mesh.group({Dim::kEp})),
      embed_tokens_(prefix_ + "embed_tokens.weight", {config_.vocab_size, config_.hidden_size}),
      norm_(prefix_ + "norm.weight", {config_.hidden_size}) {
  device::require_started(context.device, "a model");
  const NormShape norms = {config_.rms_norm_eps, config_.norm_offset};
  for (const LayerShape& shape : config_.layers) {
    layers_.push_back(std::make_unique<DecoderLayer>(
        shape, norms, fmt::format("{}layers.{}.", prefix_, layers_.size()),
        static_cast<std::int64_t>(layers_.size()), options.auxiliary_loss,
        context.mesh.size(Dim::kTp)));
  }
  if (options.head == Head::kLanguageModel) {
    lm_head_ = tied() ? std::make_unique<nn::Linear>("lm_head", embed_tokens_)
                      : std::make_unique<nn::Linear>("lm_head.weight", config_.vocab_size,
                                                     config_.hidden_size);
  }
  if (options.head == Head::kClassify) {
    if (options.num_labels < 1)
      throw_error<ConfigError>("model.num_labels must be at least 1 for model.head classify");
    if (config_.weights.classification_class.empty()) {
      throw_error<ConfigError>(
          "model.head classify: transformers has no classifier of model_type '{}' that could read "
          "the result; take a text model of the same sizes",
          config_.model_type);
    }
    score_ = std::make_unique<nn::Linear>("score.weight", options.num_labels, config_.hidden_size);
  }
  // The ranks along tp divide the rows of embedding and language-model head; other heads work on
  // the same last tokens.
  embed_tokens_.set_row_table();
  if (options.head == Head::kLanguageModel) {
    norm_.set_partial_gradient();
    head_weight().set_row_table();
  }
  units_ = make_units();
  visit_parameters([&](nn::Parameter& parameter) { parameter.place(context_.mesh); });
}

std::vector<Unit> Model::make_units() {
  std::vector<Unit> units = {{"embedding", nullptr, {&embed_tokens_}, {}}};
  for (const auto& layer : layers_) {
    units.push_back({fmt::format("layer {}", units.size() - 1), layer.get(), {}, {}});
    layer->visit_parameters(
        [&](nn::Parameter& parameter) { units.back().parameters.push_back(&parameter); });
  }
  units.push_back({"head", nullptr, {&norm_}, {}});
  if (lm_head_ && lm_head_->owns_weight()) units.back().parameters.push_back(&lm_head_->weight());
  if (score_) units.back().parameters.push_back(&score_->weight());
  if (head() == Head::kLanguageModel && tied()) units.back().reads = {0};
  const std::vector<std::int64_t> costs = unit_costs(config_);
  for (std::size_t i = 0; i < units.size(); ++i) units[i].matmul_weights = costs[i];
  return units;
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
  for (const Unit& unit : units_) {
    for (nn::Parameter* parameter : unit.parameters) visit(*parameter);
  }
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

std::pair<at::Tensor, at::Tensor> Model::rotary(const at::Tensor& position_ids) const {
  return ops::rotary_tables(
      position_ids, config_.rotary_dim, config_.rope_theta,
      position_ids.dim() == 2 ? config_.mrope_section : std::vector<std::int64_t>{},
      context_.dtype);
}

nn::Pass Model::pass_without_positions(ops::Sequences sequences, std::int64_t real_tokens,
                                       bool training) const {
  nn::Pass pass;
  pass.kernels = &kernels_;
  pass.sequences = std::move(sequences);
  if (tensor_group_.size() > 1) pass.tensor_group = &tensor_group_;
  if (expert_group_.size() > 1) pass.expert_group = &expert_group_;
  pass.real_tokens = real_tokens;
  pass.training = training;
  return pass;
}

nn::Pass Model::pass(ops::Sequences sequences, const at::Tensor& position_ids,
                     std::int64_t real_tokens, bool training) const {
  nn::Pass pass = pass_without_positions(std::move(sequences), real_tokens, training);
  std::tie(pass.cos, pass.sin) = rotary(position_ids);
  return pass;
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
  return ops::rms_norm(kernels_, hidden, {norm_.value(), config_.norm_offset},
                       config_.rms_norm_eps);
}

nn::Parameter& Model::head_weight() { return lm_head_ ? lm_head_->weight() : embed_tokens_; }

at::Tensor Model::logits(const at::Tensor& normalized, const std::vector<nn::AdaptedRows>& adapters,
                         const nn::RowAdapters* row_adapters) {
  const ops::NoGradient guard;
  const bool is_changed =
      lm_head_ && ((row_adapters != nullptr && row_adapters->of({lm_head_.get()})) ||
                   std::any_of(adapters.begin(), adapters.end(), [&](const nn::AdaptedRows& rows) {
                     return rows.set != nullptr && rows.set->of(*lm_head_) != nullptr;
                   }));
  if (is_changed) {
    nn::Pass pass;
    pass.kernels = &kernels_;
    pass.adapters = adapters;
    pass.row_adapters = row_adapters;
    return lm_head_->forward(pass, normalized);
  }
  return kernels_.get<ops::Linear>().forward({{{normalized, head_weight().data()}}})[0];
}

nn::Cache Model::make_cache(const nn::CacheSize& size) const {
  nn::Cache cache(layers_.size());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    bool is_held = false;
    layers_[i]->visit_parameters([&](const nn::Parameter& p) { is_held = is_held || p.is_held(); });
    if (is_held) cache[i] = layers_[i]->make_cache(size, context_);
  }
  return cache;
}

namespace {

/// Where a pass of several tokens a sequence writes its keys and reads those of all tokens.
void place_keys(const ops::Sequences& sequences, nn::CachedSequences& cached, c10::Device device) {
  const ops::CacheRows& rows = cached.rows;
  if (!rows.pages.defined()) return;
  std::int64_t page_tokens = 0;
  for (const nn::LayerCache& layer : *cached.cache) {
    if (layer.keys.defined()) page_tokens = layer.keys.size(1);
  }
  if (page_tokens == 0) return;  // no attention layer on this rank
  std::vector<std::int64_t> written, read;
  std::vector<std::int32_t> boundaries = {0};
  for (std::size_t s = 0; s < rows.pages_host.size(); ++s) {
    const std::int64_t before = rows.lengths_host[s],
                       count = sequences.cu_seqlens_host[s + 1] - sequences.cu_seqlens_host[s];
    rows.append_places(s, before, count, page_tokens, written);
    if (rows.longest > 0) rows.append_places(s, 0, before + count, page_tokens, read);
    boundaries.push_back(boundaries.back() + static_cast<std::int32_t>(before + count));
  }
  cached.written = device::upload(written, device);
  if (rows.longest == 0) return;
  cached.read = device::upload(read, device);
  cached.key_sequences = ops::Sequences::from_host(boundaries, device);
}

}  // namespace

nn::Pass Model::cached_pass(ops::Sequences sequences, nn::CachedSequences cached) const {
  const std::int64_t total = sequences.total();
  // One token of each sequence stands where the sequence ended.
  at::Tensor positions = cached.rows.lengths;
  if (sequences.max_seqlen != 1 || total != sequences.count()) {
    const at::Tensor host = at::empty({total}, at::kLong);
    std::int64_t* position = host.mutable_data_ptr<std::int64_t>();
    for (std::int64_t s = 0; s < sequences.count(); ++s) {
      const std::int64_t begin = sequences.cu_seqlens_host[s];
      for (std::int64_t t = begin; t < sequences.cu_seqlens_host[s + 1]; ++t)
        position[t] = cached.rows.lengths_host[s] + t - begin;
    }
    positions = device::upload(host, context_.device);
    place_keys(sequences, cached, context_.device);
  }
  nn::Pass next = pass_without_positions(std::move(sequences), total, /*training=*/false);
  if (cached.rotary.first.defined()) {
    next.cos = cached.rotary.first.index_select(0, positions);
    next.sin = cached.rotary.second.index_select(0, positions);
  } else {
    std::tie(next.cos, next.sin) = rotary(positions);
  }
  next.cached = std::make_shared<const nn::CachedSequences>(std::move(cached));
  return next;
}

}  // namespace heddle::models
