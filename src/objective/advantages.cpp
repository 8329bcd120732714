#include "objective/advantages.h"

#include <cmath>
#include <numeric>

namespace heddle::objective {
namespace {

double mean_of(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

/// Divides by n - 1; 0 for one value.
double deviation_of(std::span<const double> values, double mean) {
  if (values.size() < 2) return 0;
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

double weighted_mean(std::span<const double> values, std::span<const std::int64_t> lengths) {
  double sum = 0, weight = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    sum += static_cast<double>(lengths[i]) * values[i];
    weight += static_cast<double>(lengths[i]);
  }
  return weight > 0 ? sum / weight : 0;
}

}  // namespace

std::vector<double> group_advantages(Advantage kind, std::span<const double> rewards,
                                     std::span<const std::int64_t> lengths) {
  const auto n = static_cast<double>(rewards.size());
  const double mean = rewards.size() > 1 ? mean_of(rewards) : 0;
  double baseline = mean, factor = 1;
  switch (kind) {
    case Advantage::kGrpo:
      factor = 1 / ((rewards.size() > 1 ? deviation_of(rewards, mean) : 1) + 1e-6);
      break;
    case Advantage::kRloo:
      factor = rewards.size() > 1 ? n / (n - 1) : 1;
      break;
    case Advantage::kReinforcePlusPlus:
    case Advantage::kGae:
      baseline = 0;
      break;
    case Advantage::kOpo:
      baseline = weighted_mean(rewards, lengths);
      break;
    case Advantage::kDrGrpo:
    case Advantage::kReinforcePlusPlusBaseline:
      break;
  }
  std::vector<double> advantages;
  for (const double reward : rewards) advantages.push_back(factor * (reward - baseline));
  return advantages;
}

std::vector<double> discounted_returns(std::span<const double> rewards, std::span<const float> mask,
                                       double gamma) {
  std::vector<double> returns(rewards.size());
  double next = 0;
  for (std::size_t t = rewards.size(); t-- > 0;) {
    if (mask[t] == 0) continue;
    next = returns[t] = rewards[t] + gamma * next;
  }
  return returns;
}

TokenEstimates gae(std::span<const double> rewards, std::span<const double> values,
                   std::span<const float> mask, double gamma, double lambda) {
  TokenEstimates result{std::vector<double>(rewards.size()), std::vector<double>(rewards.size())};
  double next_value = 0, next_advantage = 0;
  for (std::size_t t = rewards.size(); t-- > 0;) {
    if (mask[t] == 0) continue;
    const double delta = rewards[t] + gamma * next_value - values[t];
    next_advantage = result.advantages[t] = delta + gamma * lambda * next_advantage;
    next_value = values[t];
    result.returns[t] = result.advantages[t] + values[t];
  }
  return result;
}

void whiten(std::span<double> values, std::span<const double> counts) {
  double n = 0, sum = 0, squares = 0;
  for (std::size_t i = 0; i < values.size(); ++i) n += counts[i], sum += counts[i] * values[i];
  if (n == 0) return;
  const double mean = sum / n;
  for (std::size_t i = 0; i < values.size(); ++i)
    squares += counts[i] * (values[i] - mean) * (values[i] - mean);
  const double scale = 1 / std::sqrt((n > 1 ? squares / (n - 1) : 0) + 1e-8);
  for (double& value : values) value = (value - mean) * scale;
}

}  // namespace heddle::objective
