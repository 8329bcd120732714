#include "models/decoder_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "nn/tensor_parallel.h"
#include "ops/rms_norm/rms_norm.h"

namespace heddle::models {

DecoderLayer::DecoderLayer(const LayerShape& shape, const NormShape& norms,
                           const std::string& prefix, std::int64_t index, bool want_auxiliary_loss,
                           std::int64_t ranks)
    : index_(index),
      norms_(norms),
      want_auxiliary_loss_(want_auxiliary_loss),
      input_layernorm_(prefix + "input_layernorm.weight", {shape.hidden_size}),
      post_attention_layernorm_(prefix + "post_attention_layernorm.weight", {shape.hidden_size}) {
  for (nn::Parameter* norm : {&input_layernorm_, &post_attention_layernorm_})
    norm->set_partial_gradient();
  if (shape.attention) attention_.emplace(prefix + "self_attn.", *shape.attention, ranks);
  if (shape.gated_delta_net)
    gated_delta_net_.emplace(prefix + "linear_attn.", *shape.gated_delta_net, ranks);
  if (shape.moe) {
    moe_.emplace(prefix + "mlp.", *shape.moe);
  } else {
    dense_.emplace(prefix + "mlp.", shape.hidden_size, shape.intermediate_size);
  }
  visit_parameters([&](nn::Parameter& parameter) { parameter.linear_place().block = index_; });
}

nn::BlockOutput DecoderLayer::forward(std::size_t stage, const at::Tensor& hidden,
                                      const nn::Pass& pass) {
  if (stage == 1) return mlp(hidden, pass);
  const auto [x, residual, x_2] = normalized(hidden, input_layernorm_, false, pass);
  nn::LayerCache* const cache =
      pass.cached ? &pass.cached->cache->at(static_cast<std::size_t>(index_)) : nullptr;
  nn::BlockOutput output;
  output.hidden = nn::run_tensor_parallel(
      x, pass, residual, [&](const nn::LinearInput& rows, const at::Tensor& own_residual) {
        return attention_ ? attention_->forward(rows, pass, own_residual, cache)
                          : gated_delta_net_->forward(rows, pass, own_residual, cache);
      });
  return output;
}

DecoderLayer::Normalized DecoderLayer::normalized(const at::Tensor& hidden,
                                                  const nn::Parameter& weight, bool is_kept,
                                                  const nn::Pass& pass) const {
  if (pass.cached && pass.tensor_group == nullptr && !is_kept && !at::GradMode::is_enabled()) {
    nn::LinearInput x(hidden);
    x.norm = {{weight.data(), norms_.offset}, norms_.eps};
    return {std::move(x), hidden, {}};
  }
  ops::NormBranches branches;
  const auto norm = [&](const ops::OutputAgain& again) {
    branches = ops::rms_norm_branches(*pass.kernels, hidden, {weight.value(), norms_.offset},
                                      norms_.eps, again);
    return branches.y;
  };
  // The ranks along tp keep what they gathered.
  is_kept |= !pass.recompute_elementwise || pass.tensor_group != nullptr;
  nn::LinearInput x = is_kept ? norm({}) : nn::LinearInput::made_again(norm);
  return {std::move(x), branches.stream, branches.y_2};
}

nn::BlockOutput DecoderLayer::mlp(const at::Tensor& hidden, const nn::Pass& pass) {
  const auto [x, residual, x_2] =
      normalized(hidden, post_attention_layernorm_, moe_.has_value(), pass);
  nn::BlockOutput output;
  if (moe_) {
    output = moe_->forward(x.value, x_2, pass, want_auxiliary_loss_, residual, pass.output_unused);
  } else {
    output.hidden = dense_->forward(x, pass, residual, pass.output_unused);
  }
  return output;
}

nn::LayerCache DecoderLayer::make_cache(const nn::CacheSize& size,
                                        const runtime::Context& context) const {
  const auto options = at::TensorOptions().dtype(context.dtype).device(context.device);
  return attention_ ? attention_->make_cache(size, options)
                    : gated_delta_net_->make_cache(size.slots, options,
                                                   size.state_dtype.value_or(context.wide_dtype()));
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

}  // namespace heddle::models
