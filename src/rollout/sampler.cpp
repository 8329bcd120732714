#include "rollout/sampler.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/where.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/hash.h"
#include "device/upload.h"

namespace heddle::rollout {

DrawTables DrawTables::of(const std::vector<Draw>& draws) {
  const auto n = static_cast<std::int64_t>(draws.size());
  DrawTables tables{at::empty({3, n}, at::kLong), at::empty({3, n}, at::kDouble)};
  std::int64_t* const whole = tables.whole.mutable_data_ptr<std::int64_t>();
  double* const real = tables.real.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < n; ++i) {
    const Draw& draw = draws[static_cast<std::size_t>(i)];
    const SamplingOptions& options = draw.options;
    whole[i] = options.top_k;
    whole[n + i] = static_cast<std::int64_t>(options.seed);
    whole[2 * n + i] = static_cast<std::int64_t>(draw.position);
    real[i] = options.temperature;
    real[n + i] = options.top_p;
    real[2 * n + i] = options.min_p;
  }
  return tables;
}

ops::SampleTokens::Inputs DrawTables::with(const at::Tensor& logits) const {
  return {logits,
          real.select(0, 0).to(at::kFloat),
          real.select(0, 1),
          real.select(0, 2),
          whole.select(0, 0),
          whole.select(0, 1),
          whole.select(0, 2)};
}

TokenTable TokenTable::of(const std::vector<Draw>& draws) {
  TokenTable table;
  for (const Draw& draw : draws) {
    table.top = std::max(table.top, draw.top);
    if (draw.wants_support) table.support = std::max(table.support, draw.options.top_k);
  }
  return table;
}

namespace {

/// The first three columns of a TokenTable.
at::Tensor as_table(const ops::SampleTokens::Tokens& tokens) {
  return at::stack({tokens.ids.to(at::kDouble), tokens.logprobs, tokens.sampled_logprobs}, 1);
}

/// Logits [n,V] fp32 with every draw's changes.
at::Tensor changed(const at::Tensor& logits, const std::vector<Draw>& draws) {
  std::vector<std::int64_t> places;
  std::vector<float> bias, penalty, taken;
  for (std::size_t row = 0; row < draws.size(); ++row) {
    for (const LogitChange& change : draws[row].changes) {
      places.push_back(static_cast<std::int64_t>(row) * logits.size(1) + change.id);
      bias.push_back(change.bias);
      penalty.push_back(change.penalty);
      taken.push_back(change.taken);
    }
  }
  const auto there = [&](const std::vector<float>& values) {
    return device::upload(at::tensor(values, at::kFloat), logits.device());
  };
  const at::Tensor index = device::upload(places, logits.device()), factor = there(penalty);
  const at::Tensor wide = logits.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  at::Tensor flat = wide.view(-1);
  const at::Tensor x = flat.index_select(0, index) + there(bias);
  flat.index_copy_(0, index, at::where(x > 0, x / factor, x * factor) - there(taken));
  return wide;
}

/// log softmax of logits [n,V] at ids [n,k], float64.
at::Tensor logprobs_at(const at::Tensor& logits, const at::Tensor& ids) {
  const at::Tensor wide = logits.to(at::kFloat);
  return wide.gather(1, ids).to(at::kDouble) - at::logsumexp(wide, 1, true).to(at::kDouble);
}

/// [n,2k]: the k most likely ids and their log-probabilities.
at::Tensor most_likely(const at::Tensor& logits, std::int64_t k) {
  const at::Tensor ids = std::get<1>(at::topk(logits.to(at::kFloat), std::min(k, logits.size(1))));
  at::Tensor found = at::full({logits.size(0), 2, k}, -1, logits.options().dtype(at::kDouble));
  found.select(1, 0).narrow(1, 0, ids.size(1)).copy_(ids);
  found.select(1, 1).narrow(1, 0, ids.size(1)).copy_(logprobs_at(logits, ids));
  return found.flatten(1);
}

}  // namespace

at::Tensor TokenTable::draw(const ops::KernelTable& kernels, const at::Tensor& logits,
                            const std::vector<Draw>& draws) const {
  const DrawTables host = DrawTables::of(draws);
  const DrawTables tables{device::upload(host.whole, logits.device()),
                          device::upload(host.real, logits.device())};
  const bool has_changes =
      std::any_of(draws.begin(), draws.end(), [](const Draw& d) { return !d.changes.empty(); });
  ops::SampleTokens::Inputs in = tables.with(has_changes ? changed(logits, draws) : logits);
  in.support = support;
  ops::SampleTokens::Tokens tokens = ops::sample_tokens(kernels, in);
  if (has_changes) {
    // Drawn from other logits than the model's.
    std::vector<std::int64_t> rows;
    for (std::size_t row = 0; row < draws.size(); ++row) {
      if (!draws[row].changes.empty()) rows.push_back(static_cast<std::int64_t>(row));
    }
    const at::Tensor index = device::upload(rows, logits.device());
    const bool all = rows.size() == draws.size();
    const auto of = [&](const at::Tensor& x) { return all ? x : x.index_select(0, index); };
    const at::Tensor own = logprobs_at(of(logits), of(tokens.ids).unsqueeze(1)).squeeze(1);
    tokens.logprobs.index_copy_(0, index, own);
  }
  std::vector<at::Tensor> columns = {as_table(tokens)};
  if (top > 0) columns.push_back(most_likely(logits, top));
  if (support > 0) columns.push_back(tokens.supports.to(at::kDouble));
  return columns.size() == 1 ? columns[0] : at::cat(columns, 1);
}

at::Tensor TokenTable::judge(const at::Tensor& logits, const at::Tensor& ids) const {
  at::Tensor table = at::full({ids.size(0), width()}, -1, logits.options().dtype(at::kDouble));
  table.select(1, 0).copy_(ids);
  table.select(1, 1).copy_(logprobs_at(logits, ids.unsqueeze(1)).squeeze(1));
  if (top > 0) table.narrow(1, 3, 2 * top).copy_(most_likely(logits, top));
  return table;
}

SampledToken TokenTable::read(const at::Tensor& table, std::int64_t row, std::int64_t wanted_top,
                              bool wants_support) const {
  const double* const entries = table.const_data_ptr<double>() + row * table.size(1);
  SampledToken token;
  token.id = static_cast<std::int32_t>(entries[0]);
  token.logprob = entries[1];
  token.sampled_logprob = entries[2];
  for (std::int64_t i = 0; i < wanted_top && entries[3 + i] >= 0; ++i)
    token.top.push_back({static_cast<std::int32_t>(entries[3 + i]), entries[3 + top + i]});
  for (std::int64_t i = 3 + 2 * top; wants_support && i < width() && entries[i] >= 0; ++i)
    token.support.push_back(static_cast<std::int32_t>(entries[i]));
  std::sort(token.support.begin(), token.support.end());
  return token;
}

std::vector<SampledToken> sample(const ops::KernelTable& kernels, const at::Tensor& logits,
                                 const std::vector<Draw>& draws) {
  const TokenTable shape = TokenTable::of(draws);
  const at::Tensor table = shape.draw(kernels, logits, draws).cpu();
  std::vector<SampledToken> tokens;
  for (std::size_t i = 0; i < draws.size(); ++i) {
    tokens.push_back(
        shape.read(table, static_cast<std::int64_t>(i), draws[i].top, draws[i].wants_support));
  }
  return tokens;
}

std::uint64_t seed_of_row(std::uint64_t seed, std::uint64_t row) {
  return hash::of(fmt::format("row/{}", row), seed);
}

std::uint64_t seed_of_sample(std::uint64_t seed, std::uint64_t sample) {
  return sample == 0 ? seed : hash::of(fmt::format("sample/{}", sample), seed);
}

}  // namespace heddle::rollout
