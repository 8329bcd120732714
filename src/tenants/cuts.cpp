#include "tenants/cuts.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
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
    Cut cut{&work, {}, {}, &result, 0, 0};
    for (; last < work.data.size(); ++last) {
      Cut longer = cut;
      longer.tokens += std::ssize(work.data[last].tokens);
      longer.rows += std::ssize(work.data[last].target_tokens);
      if (last > first && longer.cost() > pass_tokens) break;
      cut = longer;
    }
    cut.data = std::span(work.data).subspan(first, last - first);
    cut.outputs = std::span(result.data).subspan(first, last - first);
    cuts.push_back(cut);
    first = last;
  }
  return cuts;
}

std::vector<std::vector<Cut>> passes_of(const std::vector<Cut>& cuts, std::int64_t pass_tokens) {
  std::vector<std::vector<Cut>> passes;
  std::vector<std::int64_t> cost;
  std::map<SetId, std::size_t> next;  // The first pass that may take a set's next cut.
  for (const Cut& cut : cuts) {
    std::size_t pass = next[cut.work->set];
    while (pass < passes.size() && cost[pass] + cut.cost() > pass_tokens) ++pass;
    if (pass == passes.size()) {
      passes.emplace_back();
      cost.push_back(0);
    }
    passes[pass].push_back(cut);
    cost[pass] += cut.cost();
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
    // Soft targets are brought by soft_targets_of(): their labels say that there are rows.
    if (datum.has_soft_targets()) {
      targets.insert(targets.end(), datum.tokens.size(), 0);
    } else {
      targets.insert(targets.end(), datum.target_tokens.begin(), datum.target_tokens.end());
    }
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

std::optional<Targets> soft_targets_of(std::span<const Cut> cuts) {
  const auto is_soft = [](const Datum& datum) { return datum.has_soft_targets(); };
  if (std::ranges::none_of(cuts,
                           [&](const Cut& cut) { return std::ranges::any_of(cut.data, is_soft); }))
    return std::nullopt;
  Targets all;
  std::int64_t first = 0;
  for (const Cut& cut : cuts) {
    for (const Datum& datum : cut.data) {
      for (std::size_t r = 0; r < datum.target_tokens.size(); ++r) {
        const auto place = static_cast<std::int64_t>(r);
        all.positions.push_back(
            first + (is_soft(datum) ? datum.target_cells[r] / datum.target_width : place));
        all.tokens.push_back(datum.target_tokens[r]);
      }
      first += std::ssize(datum.tokens);
    }
  }
  return all;
}

CutLosses losses_of(std::span<const Cut> cuts, std::span<const double> logprobs) {
  CutLosses losses;
  std::size_t first = 0;
  for (const Cut& cut : cuts) {
    const auto values = logprobs.subspan(first, static_cast<std::size_t>(cut.rows));
    const LossValues loss = loss_of(*cut.work, cut.data, values);
    std::size_t place = 0;
    for (std::size_t i = 0; i < cut.data.size(); ++i) {
      const std::size_t length = cut.data[i].target_tokens.size();
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
