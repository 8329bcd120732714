#include "tenants/loss.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/text.h"
#include "objective/policy_loss.h"
#include "objective/sequence_sums.h"

namespace heddle::tenants {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

/// How one loss of the API is computed.
struct LossRule {
  const char* name;
  LossValues (*values)(const Work&, std::span<const Datum>, std::span<const double>);
  /// Null where they follow from the log-probabilities.
  std::vector<double> (*constant_derivatives)(std::span<const Datum>) = nullptr;
};

/// An input of a datum at all positions; `missing` where the datum has none.
void append(std::vector<double>& all, const Datum& datum, const char* name, double missing) {
  const auto it = datum.inputs.find(name);
  if (it == datum.inputs.end()) {
    all.insert(all.end(), datum.target_tokens.size(), missing);
  } else {
    all.insert(all.end(), it->second.begin(), it->second.end());
  }
}

std::vector<double> input_of(std::span<const Datum> data, const char* name, double missing = 0) {
  std::vector<double> all;
  for (const Datum& datum : data) append(all, datum, name, missing);
  return all;
}

std::vector<double> negative_weights(std::span<const Datum> data) {
  std::vector<double> weights = input_of(data, "weights", 1);
  for (double& weight : weights) weight = -weight;
  return weights;
}

/// -sum of w l.
LossValues cross_entropy(const Work&, std::span<const Datum> data,
                         std::span<const double> logprobs) {
  LossValues values;
  values.d_logprobs = negative_weights(data);
  for (std::size_t t = 0; t < logprobs.size(); ++t) {
    // A weight of 0 leaves the token out, even where it is impossible.
    const double d = values.d_logprobs[t];
    values.elementwise.push_back(d == 0 ? 0 : d * logprobs[t]);
    values.sum += values.elementwise.back();
  }
  return values;
}

/// A number of the loss's configuration.
double number_of(const Work& work, const char* name, double missing) {
  const auto it = work.config.find(name);
  return it == work.config.end() ? missing : it->second;
}

/// Thresholds of ratios by token; one number holds for all tokens that bring none of their own.
std::vector<double> clip_of(const Work& work, std::span<const Datum> data, const char* name,
                            double missing) {
  return input_of(data, name, number_of(work, name, missing));
}

/// A sum over tokens, of which `mask` (an input, or all) takes part.
LossValues policy(const Work& work, std::span<const Datum> data, std::span<const double> logprobs,
                  objective::PolicyOptions options, const char* mask_name = "") {
  options.mean = objective::LossMean::kSum;
  const std::vector<double> mask = input_of(data, mask_name, 1);
  std::vector<std::int64_t> chosen, sequence;
  std::vector<double> sequence_tokens;
  std::size_t first = 0;
  for (std::size_t i = 0; i < data.size(); ++i) {
    const std::size_t before = chosen.size(), last = first + data[i].tokens.size();
    for (; first < last; ++first) {
      if (mask[first] != 0) chosen.push_back(static_cast<std::int64_t>(first));
    }
    sequence.resize(chosen.size(), static_cast<std::int64_t>(i));
    sequence_tokens.resize(chosen.size(), static_cast<double>(chosen.size() - before));
  }
  const at::Tensor places = at::tensor(chosen, at::kLong);
  const auto chosen_of = [&](const std::vector<double>& all) {
    return at::tensor(all, at::kDouble).index_select(0, places);
  };
  objective::PolicyTokens tokens;
  tokens.old = chosen_of(input_of(data, "logprobs"));
  tokens.advantages = chosen_of(input_of(data, "advantages"));
  const LossKind::Clips clips =
      loss_kind(work.loss_fn).clips.value_or(LossKind::Clips{-kUnbounded, kUnbounded, false});
  tokens.clip_low = chosen_of(clip_of(work, data, kClipLow, clips.low));
  tokens.clip_high = chosen_of(clip_of(work, data, kClipHigh, clips.high));
  tokens.sequence_tokens = at::tensor(sequence_tokens, at::kDouble);
  std::optional<objective::SequenceSums> sequences;
  if (!options.is_by_token()) {
    sequences.emplace(comm::Group("datum"), at::tensor(sequence, at::kLong),
                      at::ones({places.numel()}, at::kDouble), std::ssize(data));
  }
  const objective::PolicyLossResult result =
      objective::policy_loss(chosen_of({logprobs.begin(), logprobs.end()}), tokens, options,
                             sequences ? &*sequences : nullptr);
  const at::Tensor d_logprobs =
      at::zeros({std::ssize(logprobs)}, at::kDouble).index_copy_(0, places, result.d_logprobs);
  const auto* d = d_logprobs.const_data_ptr<double>();
  return {result.sums.loss.item<double>(), {}, {d, d + d_logprobs.numel()}};
}

LossValues importance_sampling(const Work& work, std::span<const Datum> data,
                               std::span<const double> logprobs) {
  return policy(work, data, logprobs, {.loss = objective::PolicyLoss::kPpo});
}
LossValues ppo(const Work& work, std::span<const Datum> data, std::span<const double> logprobs) {
  return policy(work, data, logprobs, {.loss = objective::PolicyLoss::kPpo});
}
LossValues cispo(const Work& work, std::span<const Datum> data, std::span<const double> logprobs) {
  return policy(work, data, logprobs, {.loss = objective::PolicyLoss::kCispo});
}
LossValues gspo(const Work& work, std::span<const Datum> data, std::span<const double> logprobs) {
  return policy(work, data, logprobs, {.loss = objective::PolicyLoss::kGspo},
                "sequence_ratio_mask");
}
LossValues dro(const Work& work, std::span<const Datum> data, std::span<const double> logprobs) {
  return policy(work, data, logprobs,
                {.loss = objective::PolicyLoss::kDro, .dro_beta = work.config.at("beta")});
}

const LossRule& rule_of(const std::string& name) {
  static constexpr LossRule kRules[] = {
      {"cross_entropy", cross_entropy, negative_weights},
      {"importance_sampling", importance_sampling},
      {"ppo", ppo},
      {"cispo", cispo},
      {"gspo", gspo},
      {"dro", dro},
  };
  for (const LossRule& rule : kRules)
    if (name == rule.name) return rule;
  throw_error<InternalError>("loss_fn '{}' has no rule", name);
}

}  // namespace

LossValues loss_of(const Work& work, std::span<const Datum> data,
                   std::span<const double> logprobs) {
  return rule_of(work.loss_fn).values(work, data, logprobs);
}

std::optional<std::vector<double>> constant_derivatives(const Work& work,
                                                        std::span<const Datum> data) {
  const LossRule& rule = rule_of(work.loss_fn);
  if (rule.constant_derivatives == nullptr) return std::nullopt;
  return rule.constant_derivatives(data);
}

}  // namespace heddle::tenants
