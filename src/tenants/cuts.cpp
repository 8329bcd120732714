#include "tenants/cuts.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include <map>
#include <numeric>

#include "tenants/loss.h"

namespace heddle::tenants {
namespace {

std::int64_t tokens_of(std::span<const Datum> data) {
  return std::accumulate(data.begin(), data.end(), std::int64_t{0},
                         [](std::int64_t sum, const Datum& datum) {
                           return sum + static_cast<std::int64_t>(datum.tokens.size());
                         });
}

}  // namespace

std::vector<Cut> cuts_of(const Work& work, WorkResult& result, std::int64_t pass_tokens) {
  std::vector<Cut> cuts;
  for (std::size_t first = 0; first < work.data.size();) {
    std::size_t last = first;
    std::int64_t tokens = 0;
    do {
      tokens += static_cast<std::int64_t>(work.data[last++].tokens.size());
    } while (last < work.data.size() &&
             tokens + static_cast<std::int64_t>(work.data[last].tokens.size()) <= pass_tokens);
    cuts.push_back({&work, std::span(work.data).subspan(first, last - first),
                    std::span(result.data).subspan(first, last - first), &result, tokens});
    first = last;
  }
  return cuts;
}

std::vector<std::vector<Cut>> passes_of(const std::vector<Cut>& cuts, std::int64_t pass_tokens) {
  std::vector<std::vector<Cut>> passes;
  std::vector<std::int64_t> tokens;
  std::map<SetId, std::size_t> next;  // The first pass that may take a set's next cut.
  for (const Cut& cut : cuts) {
    std::size_t pass = next[cut.work->set];
    while (pass < passes.size() && tokens[pass] + cut.tokens > pass_tokens) ++pass;
    if (pass == passes.size()) {
      passes.emplace_back();
      tokens.push_back(0);
    }
    passes[pass].push_back(cut);
    tokens[pass] += cut.tokens;
    next[cut.work->set] = pass + 1;
  }
  return passes;
}

data::Batch batch_of(std::span<const Datum> data) {
  const auto total = static_cast<std::size_t>(tokens_of(data));
  const std::vector<float> weights(total, 1.0F);
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> targets;
  for (const Datum& datum : data) {
    tokens.insert(tokens.end(), datum.tokens.begin(), datum.tokens.end());
    targets.insert(targets.end(), datum.target_tokens.begin(), datum.target_tokens.end());
  }
  std::vector<data::SequenceView> views;
  std::size_t first = 0;
  for (std::size_t i = 0; i < data.size(); ++i) {
    const std::size_t length = data[i].tokens.size();
    const auto own = std::span(tokens).subspan(first, length);
    views.push_back(
        {own, own, std::span(weights).subspan(first, length), static_cast<std::int64_t>(i)});
    first += length;
  }
  data::Batch batch = data::Batch::from_sequences(views);
  batch.labels = at::tensor(targets, at::kLong);
  batch.loss_weights = at::ones({static_cast<std::int64_t>(total)}, at::kFloat);
  batch.loss_rows = static_cast<std::int64_t>(total);
  return batch;
}

CutLosses losses_of(std::span<const Cut> cuts, std::span<const double> logprobs) {
  CutLosses losses;
  std::size_t first = 0;
  for (const Cut& cut : cuts) {
    const auto values = logprobs.subspan(first, static_cast<std::size_t>(cut.tokens));
    const LossValues loss = loss_of(*cut.work, cut.data, values);
    std::size_t place = 0;
    for (std::size_t i = 0; i < cut.data.size(); ++i) {
      const std::size_t length = cut.data[i].tokens.size();
      const auto part = values.subspan(place, length);
      cut.outputs[i].logprobs.assign(part.begin(), part.end());
      if (!loss.elementwise.empty()) {
        const auto own = std::span(loss.elementwise).subspan(place, length);
        cut.outputs[i].elementwise_loss.assign(own.begin(), own.end());
      }
      place += length;
    }
    losses.sums.push_back(loss.sum);
    losses.d_logprobs.insert(losses.d_logprobs.end(), loss.d_logprobs.begin(),
                             loss.d_logprobs.end());
    first += values.size();
  }
  return losses;
}

std::optional<std::vector<double>> constant_derivatives(std::span<const Cut> cuts) {
  std::vector<double> all;
  for (const Cut& cut : cuts) {
    const auto own = constant_derivatives(*cut.work, cut.data);
    if (!own) return std::nullopt;
    all.insert(all.end(), own->begin(), own->end());
  }
  return all;
}

}  // namespace heddle::tenants
