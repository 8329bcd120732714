#include "nn/attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "ops/attention/attention.h"
#include "ops/attention/attention_decode.h"
#include "ops/autograd.h"
#include "ops/context_parallel/context_parallel.h"
#include "ops/rotary/rotary.h"

namespace heddle::nn {

using comm::Dim;

Attention::Attention(const std::string& prefix, const AttentionDims& dims, std::int64_t ranks)
    : dims_(dims),
      q_proj_(prefix + "q_proj.weight",
              (dims.has_output_gate ? 2 : 1) * dims.num_attention_heads * dims.head_dim,
              dims.hidden_size, {{Dim::kTp, 0, {}}}),
      k_proj_(prefix + "k_proj.weight", dims.num_key_value_heads * dims.head_dim, dims.hidden_size,
              {{Dim::kTp, 0, {}, dims.num_key_value_heads}}),
      v_proj_(prefix + "v_proj.weight", dims.num_key_value_heads * dims.head_dim, dims.hidden_size,
              {{Dim::kTp, 0, {}, dims.num_key_value_heads}}),
      o_proj_(prefix + "o_proj.weight", dims.hidden_size, dims.num_attention_heads * dims.head_dim,
              {{Dim::kTp, 1, {}}}),
      q_norm_(prefix + "q_norm.weight", {dims.head_dim}),
      k_norm_(prefix + "k_norm.weight", {dims.head_dim}) {
  if (ranks == 1) return;
  dims_.num_attention_heads /= ranks;
  // With more ranks than key/value heads, several ranks have the same head.
  dims_.num_key_value_heads = std::max<std::int64_t>(1, dims.num_key_value_heads / ranks);
  q_norm_.set_partial_gradient();
  k_norm_.set_partial_gradient();
}

std::int64_t ulysses_key_copies(std::int64_t num_key_value_heads, std::int64_t ranks) {
  return ranks / std::gcd(ranks, num_key_value_heads);
}

Attention::Projected Attention::project(const LinearInput& x, const Pass& pass) {
  const std::int64_t T = x.value.size(0), D = dims_.head_dim;
  const std::vector<at::Tensor> outputs = forward_all(pass, x, {&q_proj_, &k_proj_, &v_proj_});
  const at::Tensor k_THD = outputs[1].view({T, dims_.num_key_value_heads, D});
  Projected projected;
  projected.v = outputs[2].view({T, dims_.num_key_value_heads, D});
  at::Tensor q_THD = outputs[0].view({T, dims_.num_attention_heads, -1});
  if (dims_.has_output_gate) {
    const ops::Halves halves = ops::split_halves(q_THD);
    q_THD = halves.first;
    projected.gate = halves.second;
    projected.halves = halves.gradients;
  }
  const auto norm_rope = [&](const at::Tensor& x, const Parameter& weight,
                             const std::shared_ptr<ops::GradientHalves>& halves) {
    return ops::qk_norm_rope(*pass.kernels, x, {weight.value(), dims_.norm_offset}, pass.cos,
                             pass.sin, dims_.rms_norm_eps, halves);
  };
  projected.q = norm_rope(q_THD, q_norm_, projected.halves);
  projected.k = norm_rope(k_THD, k_norm_, nullptr);
  return projected;
}

at::Tensor Attention::finish(const at::Tensor& o, const Projected& projected, const Pass& pass,
                             const at::Tensor& residual) {
  const std::vector<std::int64_t> flat = {o.size(0), dims_.num_attention_heads * dims_.head_dim};
  const auto gated = [&](const ops::OutputAgain& again) {
    return ops::output_gate(*pass.kernels, o, projected.gate, again, projected.halves).view(flat);
  };
  const auto gated_again = [&](const ops::OutputAgain& again) {
    return gated([again, flat](const at::Tensor& y) { again(y.view(flat)); });
  };
  LinearInput input = !projected.gate.defined()    ? LinearInput(o.reshape(flat))
                      : pass.recompute_elementwise ? LinearInput::made_again(gated_again)
                                                   : gated({});
  input.residual = residual;
  return o_proj_.forward(pass, input);
}

at::Tensor Attention::attend(const Projected& projected, const Pass& pass) const {
  const auto& [q, k, v, gate, halves] = projected;
  if (!pass.context) {
    return ops::attention(*pass.kernels, {q, k, v, pass.sequences, pass.sequences, 0});
  }
  if (pass.context->plan.method() == ops::ContextMethod::kUlysses)
    return attend_by_ulysses(projected, pass);
  return ops::attention(*pass.kernels, ops::context_attention_inputs(q, k, v, *pass.context));
}

at::Tensor Attention::attend_by_ulysses(const Projected& projected, const Pass& pass) const {
  const ops::ContextParallel& context = *pass.context;
  const std::int64_t T = projected.q.size(0), D = dims_.head_dim;
  const std::int64_t copies = ulysses_key_copies(dims_.num_key_value_heads, context.plan.ranks());
  const auto copied = [&](const at::Tensor& x) {
    return x.unsqueeze(2).expand({-1, -1, copies, -1}).flatten(1);
  };
  const std::vector<at::Tensor> heads = ops::tokens_to_heads(
      {projected.q.flatten(1), copied(projected.k), copied(projected.v)}, context);
  const auto of = [&](std::size_t i) { return heads[i].reshape({heads[i].size(0), -1, D}); };
  const at::Tensor o =
      ops::attention(*pass.kernels, {of(0), of(1), of(2), context.sequences, context.sequences, 0});
  return ops::heads_to_tokens(o.flatten(1), context).view({T, dims_.num_attention_heads, D});
}

at::Tensor Attention::attend_cached(const Projected& projected, const Pass& pass,
                                    LayerCache& cache) const {
  const auto& [q, k, v, gate, halves] = projected;
  const ops::Sequences& sequences = pass.sequences;
  const ops::CacheRows& rows = pass.cached->rows;
  const std::int64_t count = sequences.count();
  if (sequences.max_seqlen == 1 && sequences.total() == count)
    return ops::attention_decode(*pass.kernels, {q, k, v, cache.keys, cache.values, 0}, rows);
  at::Tensor keys = cache.keys.flatten(0, 1), values = cache.values.flatten(0, 1);
  keys.index_copy_(0, pass.cached->written, k);
  values.index_copy_(0, pass.cached->written, v);
  if (!pass.cached->read.defined())
    return ops::attention(*pass.kernels, {q, k, v, sequences, sequences, 0});
  // A prompt in pieces: each sequence's new queries against its whole cache.
  const at::Tensor& read = pass.cached->read;
  return ops::attention(*pass.kernels, {q, keys.index_select(0, read), values.index_select(0, read),
                                        sequences, pass.cached->key_sequences, 0});
}

at::Tensor Attention::forward(const LinearInput& x, const Pass& pass, const at::Tensor& residual,
                              LayerCache* cache) {
  const Projected projected = project(x, pass);
  const at::Tensor o =
      cache != nullptr ? attend_cached(projected, pass, *cache) : attend(projected, pass);
  return finish(o, projected, pass, residual);
}

LayerCache Attention::make_cache(const CacheSize& size, const at::TensorOptions& options) const {
  const std::vector<std::int64_t> shape = {size.pages, size.page_tokens, dims_.num_key_value_heads,
                                           dims_.head_dim};
  LayerCache cache;
  cache.keys = at::zeros(shape, options);
  cache.values = at::zeros(shape, options);
  return cache;
}

void Attention::visit_parameters(const std::function<void(Parameter&)>& visit) {
  visit_linears([&](Linear& linear) { visit(linear.weight()); });
  visit(q_norm_);
  visit(k_norm_);
}

void Attention::visit_linears(const std::function<void(Linear&)>& visit) {
  for (Linear* linear : {&q_proj_, &k_proj_, &v_proj_, &o_proj_}) visit(*linear);
}

}  // namespace heddle::nn
