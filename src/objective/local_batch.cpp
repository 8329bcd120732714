#include "objective/local_batch.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "data/context_share.h"
#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/context_parallel/context_parallel.h"
#include "ops/embedding/noise.h"
#include "ops/linear/dropout.h"

namespace heddle::objective {

LocalBatch::LocalBatch(const Model& model, const data::Batch& whole, const adapters::LoraSet* set,
                       std::uint64_t dropout_step, const Neftune& neftune)
    : host(whole), neftune_(neftune), whole_sequences_(whole.real_sequences) {
  host = data::with_dummy_tail(std::move(host), model.padded_tokens(whole.size()));
  host.number_tokens();
  context = model.context_of(host.cu_seqlens_host);
  if (context) host = data::context_share(host, context->plan);
  device = host.to(model.context().device);
  if (dropout_step > 0 && neftune.alpha > 0) draw_noise(model, whole, dropout_step);
  if (set == nullptr) return;
  adapters = {{set, host.size(), {}}};
  if (dropout_step > 0 && set->options().dropout > 0)
    adapters[0].draws = ops::dropout_draws(device.token_numbers, dropout_step);
}

/// +-alpha / sqrt(L H), with L the length of the token's whole sequence. Tokens of the tail have
/// none.
void LocalBatch::draw_noise(const Model& model, const data::Batch& whole, std::uint64_t step) {
  const double of_one = neftune_.alpha / std::sqrt(static_cast<double>(model.config().hidden_size));
  std::vector<float> by_token;
  for (std::int64_t s = 0; s < whole.real_sequences; ++s) {
    const auto i = static_cast<std::size_t>(s);
    const std::int64_t length = whole.cu_seqlens_host[i + 1] - whole.cu_seqlens_host[i];
    by_token.insert(by_token.end(), static_cast<std::size_t>(length),
                    static_cast<float>(of_one / std::sqrt(static_cast<double>(length))));
  }
  std::vector<float> scales;
  for (const std::int64_t place : places_of_tokens()) {
    const auto i = static_cast<std::size_t>(place);
    scales.push_back(i < by_token.size() ? by_token[i] : 0.f);
  }
  noise_scales = device::upload(at::tensor(scales, at::kFloat), model.context().device);
  noise_draws = ops::dropout_draws(device.token_numbers, step);
}

at::Tensor LocalBatch::embed(Model& model) const {
  const at::Tensor embedded = model.embed(device.tokens);
  if (!noise_draws.defined()) return embedded;
  const ops::Rows own = ops::own_rows(host.size(), model.tensor_group());
  return embedded + ops::embedding_noise(neftune_.key, noise_draws.narrow(0, own.first, own.count),
                                         noise_scales.narrow(0, own.first, own.count),
                                         embedded.size(1), embedded.scalar_type());
}

nn::Pass LocalBatch::pass(const Model& model, bool training) const {
  nn::Pass pass = model.pass({device.cu_seqlens, device.cu_seqlens_host, device.max_seqlen},
                             device.position_ids, device.real_tokens, training);
  pass.context = context;
  pass.adapters = adapters;
  return pass;
}

std::vector<std::int64_t> LocalBatch::hidden_sizes(const Model& model) const {
  return {ops::own_rows(host.size(), model.tensor_group()).count, model.config().hidden_size};
}

std::vector<std::int64_t> LocalBatch::sequences_ending_here() const {
  if (context) return data::sequences_ending_here(whole_sequences_, context->plan);
  std::vector<std::int64_t> sequences(static_cast<std::size_t>(whole_sequences_));
  std::iota(sequences.begin(), sequences.end(), 0);
  return sequences;
}

std::vector<std::int64_t> LocalBatch::sequences_of_tokens() const {
  if (context) return data::sequences_of_tokens(context->plan);
  std::vector<std::int64_t> sequences;
  for (std::size_t s = 0; s + 1 < host.cu_seqlens_host.size(); ++s) {
    sequences.insert(sequences.end(), host.cu_seqlens_host[s + 1] - host.cu_seqlens_host[s],
                     static_cast<std::int64_t>(s));
  }
  return sequences;
}

std::vector<std::int64_t> LocalBatch::places_of_tokens() const {
  std::vector<std::int64_t> places;
  const auto add = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) places.push_back(t);
  };
  if (!context) {
    add(0, host.size());
    return places;
  }
  const ops::ContextPlan& plan = context->plan;
  for (const std::int64_t j : plan.held(plan.rank())) add(plan.begin(j), plan.end(j));
  return places;
}

std::int64_t largest_micro_batch(const Model& model, std::span<const data::Batch> batches) {
  std::int64_t largest = 0;
  for (const data::Batch& batch : batches)
    largest = std::max(largest, model.padded_tokens(batch.size()));
  return largest;
}

at::Tensor evaluate_hidden(Model& model, parallel::Pipeline& pipeline, const LocalBatch& batch,
                           std::vector<at::Tensor>* experts) {
  return pipeline.evaluate(model, batch.device.tokens, batch.pass(model, /*training=*/false),
                           experts);
}

}  // namespace heddle::objective
