#include "rollout/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include <fmt/format.h>

#include "base/hash.h"
#include "base/rng.h"

namespace heddle::rollout {
namespace {

/// Candidates from the most likely on, cut by top-k and top-p, with unnormalised weights at the
/// temperature.
std::int32_t draw(std::span<const float> logits, float highest, const SamplingOptions& options,
                  double uniform) {
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto more_likely = [&](std::int32_t a, std::int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  std::size_t kept = logits.size();
  if (options.top_k > 0 && static_cast<std::size_t>(options.top_k) < kept) {
    kept = static_cast<std::size_t>(options.top_k);
    std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept) - 1,
                     order.end(), more_likely);
    order.resize(kept);
  }
  if (options.top_p < 1) std::sort(order.begin(), order.end(), more_likely);
  std::vector<double> weights(kept);
  double total = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    weights[i] = std::exp((static_cast<double>(logits[order[i]]) - highest) / options.temperature);
    total += weights[i];
  }
  if (options.top_p < 1) {
    double sum = 0;
    std::size_t count = 0;
    while (count < kept && sum < options.top_p * total) sum += weights[count++];
    kept = std::max<std::size_t>(1, count);
    total =
        std::accumulate(weights.begin(), weights.begin() + static_cast<std::ptrdiff_t>(kept), 0.0);
  }
  double rest = uniform * total;
  for (std::size_t i = 0; i + 1 < kept; ++i) {
    rest -= weights[i];
    if (rest < 0) return order[i];
  }
  return order[kept - 1];
}

}  // namespace

SampledToken sample(std::span<const float> logits, const SamplingOptions& options,
                    std::uint64_t position) {
  const auto best = std::max_element(logits.begin(), logits.end());
  const float highest = *best;
  SampledToken token{static_cast<std::int32_t>(best - logits.begin()), 0};
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - highest));
  // Logits that have no order are not sorted.
  if (options.temperature > 0 && std::isfinite(sum)) {
    const CounterRng rng(options.seed, "sample");
    token.id = draw(logits, highest, options, rng.uniform(position));
  }
  token.logprob = static_cast<double>(logits[token.id] - highest) - std::log(sum);
  return token;
}

std::uint64_t seed_of_row(std::uint64_t seed, std::uint64_t row) {
  return hash::of(fmt::format("row/{}", row), seed);
}

}  // namespace heddle::rollout
