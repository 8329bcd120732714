#include "nn/gated_delta_net.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/autograd.h"
#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/context_parallel/context_parallel.h"
#include "ops/gated_delta_net/gated_delta_net.h"
#include "ops/gated_delta_net/gated_delta_rule_decode.h"

namespace heddle::nn {

using comm::Dim;

GatedDeltaNet::GatedDeltaNet(const std::string& prefix, const GatedDeltaNetDims& dims,
                             std::int64_t ranks)
    : dims_(dims),
      out_proj_(prefix + "out_proj.weight", dims.hidden_size, dims.value_dim(),
                {{Dim::kTp, 1, {}}}),
      conv_(prefix + "conv1d.weight", {dims.conv_channels(), 1, dims.conv_kernel},
            {{Dim::kTp, 0, {dims.key_dim(), dims.key_dim(), dims.value_dim()}}}),
      a_log_(prefix + "A_log", {dims.num_value_heads}, {{Dim::kTp, 0, {}}}),
      dt_bias_(prefix + "dt_bias", {dims.num_value_heads}, {{Dim::kTp, 0, {}}}),
      norm_(prefix + "norm.weight", {dims.value_head_dim}) {
  const std::int64_t H = dims.hidden_size, K = dims.key_dim(), V = dims.value_dim(),
                     Hv = dims.num_value_heads;
  if (dims.interleaved_projections) {
    projections_.push_back(std::make_unique<Linear>(prefix + "in_proj_qkvz.weight", 2 * K + 2 * V,
                                                    H, Placement{{Dim::kTp, 0, {}}}));
    projections_.push_back(std::make_unique<Linear>(prefix + "in_proj_ba.weight", 2 * Hv, H,
                                                    Placement{{Dim::kTp, 0, {}}}));
  } else {
    projections_.push_back(std::make_unique<Linear>(prefix + "in_proj_qkv.weight", 2 * K + V, H,
                                                    Placement{{Dim::kTp, 0, {K, K, V}}}));
    projections_.push_back(
        std::make_unique<Linear>(prefix + "in_proj_z.weight", V, H, Placement{{Dim::kTp, 0, {}}}));
    projections_.push_back(
        std::make_unique<Linear>(prefix + "in_proj_b.weight", Hv, H, Placement{{Dim::kTp, 0, {}}}));
    projections_.push_back(
        std::make_unique<Linear>(prefix + "in_proj_a.weight", Hv, H, Placement{{Dim::kTp, 0, {}}}));
  }
  if (ranks == 1) return;
  dims_.num_key_heads /= ranks;
  dims_.num_value_heads /= ranks;
  norm_.set_partial_gradient();
}

GatedDeltaNet::Projected GatedDeltaNet::project(const LinearInput& x, const Pass& pass) {
  const std::int64_t T = x.value.size(0), Hk = dims_.num_key_heads, Hv = dims_.num_value_heads;
  const std::int64_t K = dims_.key_head_dim, V = dims_.value_head_dim, r = Hv / Hk;
  std::vector<Linear*> layers;
  for (const auto& layer : projections_) layers.push_back(layer.get());
  const std::vector<at::Tensor> outputs = forward_all(pass, x, layers);
  if (!dims_.interleaved_projections) {
    return {outputs[0], outputs[1].view({T, Hv, V}), outputs[2], outputs[3]};
  }
  // Per key head: [q K, k K, v r*V, z r*V] and [b r, a r].
  const at::Tensor qkvz = outputs[0].view({T, Hk, 2 * K + 2 * r * V});
  const at::Tensor ba = outputs[1].view({T, Hk, 2 * r});
  const auto flat = [T](const at::Tensor& t) { return t.reshape({T, -1}); };
  return {at::cat({flat(qkvz.narrow(2, 0, K)), flat(qkvz.narrow(2, K, K)),
                   flat(qkvz.narrow(2, 2 * K, r * V))},
                  1),
          qkvz.narrow(2, 2 * K + r * V, r * V).reshape({T, Hv, V}),
          ba.narrow(2, 0, r).reshape({T, Hv}), ba.narrow(2, r, r).reshape({T, Hv})};
}

at::Tensor GatedDeltaNet::finish(const at::Tensor& o, const Projected& projected, const Pass& pass,
                                 const at::Tensor& residual) {
  const std::vector<std::int64_t> flat = {o.size(0), dims_.value_dim()};
  const auto norm = [&](const ops::OutputAgain& again) {
    return ops::gated_rms_norm(*pass.kernels, o, projected.z, norm_.value(), dims_.rms_norm_eps,
                               again)
        .view(flat);
  };
  const auto norm_again = [&](const ops::OutputAgain& again) {
    return norm([again, flat](const at::Tensor& y) { again(y.view(flat)); });
  };
  LinearInput input =
      pass.recompute_elementwise ? LinearInput::made_again(norm_again) : LinearInput(norm({}));
  input.residual = residual;
  return out_proj_.forward(pass, input);
}

std::array<at::Tensor, 3> GatedDeltaNet::split_qkv(const at::Tensor& qkv) const {
  return ops::split_qkv(qkv, dims_.num_key_heads, dims_.key_head_dim, dims_.num_value_heads,
                        dims_.value_head_dim);
}

GatedDeltaNet::Mixing GatedDeltaNet::mixing(const Projected& projected) const {
  return {projected.qkv,  projected.a,      projected.b,         conv_.value().squeeze(1),
          a_log_.value(), dt_bias_.value(), dims_.num_key_heads, dims_.num_value_heads};
}

at::Tensor GatedDeltaNet::run(const Mixing& m, const ops::Sequences& sequences,
                              const Pass& pass) const {
  const ops::ContextParallel* states_from =
      pass.context && pass.context->plan.method() == ops::ContextMethod::kState ? pass.context.get()
                                                                                : nullptr;
  const auto split = [m, K = dims_.key_head_dim, V = dims_.value_head_dim](const at::Tensor& qkv) {
    return ops::split_qkv(qkv, m.num_key_heads, K, m.num_value_heads, V);
  };
  ops::CausalConv1d::Inputs conv;
  conv.x = m.qkv;
  conv.weight = m.conv_weight;
  conv.sequences = sequences;
  if (states_from != nullptr)
    conv.initial_state = ops::context_conv_state(m.qkv, dims_.conv_kernel, *states_from);
  const auto [q, k, v] = split(ops::causal_conv1d(*pass.kernels, conv).y);
  const auto [g, beta] = ops::gdn_gates(*pass.kernels, m.a, m.b, m.a_log, m.dt_bias);
  ops::GatedDeltaRule::Inputs rule{q, k, v, g, beta, {}, sequences, {}, {}};
  if (pass.recompute_elementwise && !dims_.keeps_convolution) {
    for (at::Tensor* tensor : {&conv.x, &conv.weight, &conv.initial_state})
      *tensor = ops::detached(*tensor);
    rule.qkv_again = [split, conv, kernels = pass.kernels] {
      return split(ops::causal_conv1d(*kernels, conv).y);
    };
  }
  if (states_from != nullptr)
    return ops::context_gated_delta_rule(*pass.kernels, rule, *states_from);
  return ops::gated_delta_rule(*pass.kernels, rule).o;
}

at::Tensor GatedDeltaNet::mix_by_ulysses(const Projected& projected, const Pass& pass) const {
  const ops::ContextParallel& context = *pass.context;
  const std::int64_t n = context.plan.ranks(), rank = context.plan.rank();
  const std::int64_t K = dims_.key_dim(), V = dims_.value_dim();
  const auto by_head = [&](const at::Tensor& x) {
    const std::int64_t size = x.size(0) / n;
    return x.narrow(0, rank * size, size);
  };
  Mixing m = mixing(projected);
  const std::vector<at::Tensor> qkv = m.qkv.split_with_sizes({K, K, V}, 1);
  const std::vector<at::Tensor> mine =
      ops::tokens_to_heads({qkv[0], qkv[1], qkv[2], m.a, m.b}, context);
  m.qkv = at::cat({mine[0], mine[1], mine[2]}, 1);
  m.a = mine[3].contiguous();
  m.b = mine[4].contiguous();
  const std::vector<at::Tensor> weights = m.conv_weight.split_with_sizes({K, K, V}, 0);
  m.conv_weight = at::cat({by_head(weights[0]), by_head(weights[1]), by_head(weights[2])});
  m.a_log = by_head(m.a_log);
  m.dt_bias = by_head(m.dt_bias);
  m.num_key_heads /= n;
  m.num_value_heads /= n;
  const at::Tensor o = run(m, context.sequences, pass);
  return ops::heads_to_tokens(o.flatten(1), context)
      .view({projected.qkv.size(0), dims_.num_value_heads, dims_.value_head_dim});
}

at::Tensor GatedDeltaNet::mix(const Projected& projected, const Pass& pass) const {
  if (pass.context && pass.context->plan.method() == ops::ContextMethod::kUlysses)
    return mix_by_ulysses(projected, pass);
  return run(mixing(projected), pass.sequences, pass);
}

at::Tensor GatedDeltaNet::mix_cached(const Projected& projected, const Pass& pass,
                                     LayerCache& cache) const {
  const auto [g, beta] =
      ops::gdn_gates(*pass.kernels, projected.a, projected.b, a_log_.value(), dt_bias_.value());
  const ops::Sequences& sequences = pass.sequences;
  const at::Tensor& index = pass.cached->rows.slots;
  const auto conv =
      ops::causal_conv1d(*pass.kernels, {projected.qkv, conv_.value().squeeze(1),
                                         cache.conv.index_select(0, index), sequences, true});
  const auto [q, k, v] = split_qkv(conv.y);
  ops::GatedDeltaRuleOptions options;
  options.want_final_state = true;
  const at::Tensor state = cache.state.index_select(0, index).to(g.scalar_type());
  const auto rule =
      ops::gated_delta_rule(*pass.kernels, {q, k, v, g, beta, state, sequences, options, {}});
  cache.conv.index_copy_(0, index, conv.final_state);
  cache.state.index_copy_(0, index, rule.final_state.to(cache.state.scalar_type()));
  return rule.o;
}

at::Tensor GatedDeltaNet::decode(const Projected& projected, const Pass& pass,
                                 const at::Tensor& residual, LayerCache& cache) {
  LinearInput y = ops::gated_delta_net_decode(
      *pass.kernels,
      {projected.qkv, projected.a, projected.b, projected.z, conv_.value().squeeze(1),
       a_log_.value(), dt_bias_.value(), norm_.value(), cache.conv, cache.state,
       dims_.num_key_heads, dims_.rms_norm_eps},
      pass.cached->rows);
  y.residual = residual;
  return out_proj_.forward(pass, y);
}

at::Tensor GatedDeltaNet::forward(const LinearInput& x, const Pass& pass,
                                  const at::Tensor& residual, LayerCache* cache) {
  const Projected projected = project(x, pass);
  const ops::Sequences& sequences = pass.sequences;
  if (cache != nullptr && sequences.max_seqlen == 1 && sequences.total() == sequences.count())
    return decode(projected, pass, residual, *cache);
  const at::Tensor o =
      cache != nullptr ? mix_cached(projected, pass, *cache) : mix(projected, pass);
  return finish(o, projected, pass, residual);
}

LayerCache GatedDeltaNet::make_cache(std::int64_t slots, const at::TensorOptions& options,
                                     c10::ScalarType state_dtype) const {
  LayerCache cache;
  cache.conv = at::zeros({slots, dims_.conv_channels(), dims_.conv_kernel - 1}, options);
  cache.state = at::zeros({slots, dims_.num_value_heads, dims_.key_head_dim, dims_.value_head_dim},
                          options.dtype(state_dtype));
  return cache;
}

void GatedDeltaNet::visit_parameters(const std::function<void(Parameter&)>& visit) {
  visit_linears([&](Linear& linear) { visit(linear.weight()); });
  for (Parameter* parameter : {&conv_, &a_log_, &dt_bias_, &norm_}) visit(*parameter);
}

void GatedDeltaNet::visit_linears(const std::function<void(Linear&)>& visit) {
  for (const auto& linear : projections_) visit(*linear);
  visit(out_proj_);
}

}  // namespace heddle::nn
