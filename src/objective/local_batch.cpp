#include "objective/local_batch.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "data/context_share.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/context_parallel/context_parallel.h"
#include "ops/linear/dropout.h"

namespace heddle::objective {

LocalBatch::LocalBatch(const Model& model, const data::Batch& whole, const adapters::LoraSet* set,
                       std::uint64_t dropout_step)
    : host(whole), whole_sequences_(whole.real_sequences) {
  host = data::with_dummy_tail(std::move(host), model.padded_tokens(whole.size()));
  host.number_tokens();
  context = model.context_of(host.cu_seqlens_host);
  if (context) host = data::context_share(host, context->plan);
  device = host.to(model.context().device);
  if (set == nullptr) return;
  adapters = {{set, host.size(), {}}};
  if (dropout_step > 0 && set->options().dropout > 0)
    adapters[0].draws = ops::dropout_draws(device.token_numbers, dropout_step);
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

at::Tensor evaluate_hidden(Model& model, parallel::Pipeline& pipeline, const LocalBatch& batch) {
  return pipeline.evaluate(model, batch.device.tokens, batch.pass(model, /*training=*/false));
}

}  // namespace heddle::objective
