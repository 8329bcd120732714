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

struct Input {
  const char* name;
  bool required;
};

using Number = Input;

/// One loss of the API.
struct LossKind {
  const char* name;
  std::vector<Input> inputs;    ///< Besides target_tokens.
  std::vector<Number> numbers;  ///< From its configuration.
  LossValues (*values)(const Work&, std::span<const Datum>, std::span<const double>);
  /// Null where they follow from the log-probabilities.
  std::vector<double> (*constant_derivatives)(std::span<const Datum>) = nullptr;
  bool takes_soft_targets = false;
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
                  objective::PolicyOptions options, double low, double high,
                  const char* mask_name = "") {
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
  tokens.clip_low = chosen_of(clip_of(work, data, "clip_low_threshold", low));
  tokens.clip_high = chosen_of(clip_of(work, data, "clip_high_threshold", high));
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

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

LossValues importance_sampling(const Work& work, std::span<const Datum> data,
                               std::span<const double> logprobs) {
  return policy(work, data, logprobs, {.loss = objective::PolicyLoss::kPpo}, -kUnbounded,
                kUnbounded);
}
LossValues ppo(const Work& work, std::span<const Datum> data, std::span<const double> logprobs) {
  return policy(work, data, logprobs, {.loss = objective::PolicyLoss::kPpo}, 0.8, 1.2);
}
LossValues cispo(const Work& work, std::span<const Datum> data, std::span<const double> logprobs) {
  return policy(work, data, logprobs, {.loss = objective::PolicyLoss::kCispo}, 0, 4);
}
/// Defaults of "Group Sequence Policy Optimization" (arXiv 2507.18071), section 5.1.
LossValues gspo(const Work& work, std::span<const Datum> data, std::span<const double> logprobs) {
  return policy(work, data, logprobs, {.loss = objective::PolicyLoss::kGspo}, 1 - 3e-4, 1 + 4e-4,
                "sequence_ratio_mask");
}
LossValues dro(const Work& work, std::span<const Datum> data, std::span<const double> logprobs) {
  return policy(work, data, logprobs,
                {.loss = objective::PolicyLoss::kDro, .dro_beta = work.config.at("beta")},
                -kUnbounded, kUnbounded);
}

const std::vector<LossKind>& kinds() {
  const std::vector<Input> sampled = {{"logprobs", true}, {"advantages", true}};
  const auto with = [&](std::vector<Input> more) {
    more.insert(more.begin(), sampled.begin(), sampled.end());
    return more;
  };
  const std::vector<Number> clips = {{"clip_low_threshold", false}, {"clip_high_threshold", false}};
  static const std::vector<LossKind> all = {
      {"cross_entropy", {{"weights", false}}, {}, cross_entropy, negative_weights, true},
      {"importance_sampling", sampled, {}, importance_sampling},
      {"ppo", with({{"clip_low_threshold", false}, {"clip_high_threshold", false}}), clips, ppo},
      {"cispo", with({{"clip_low_threshold", false}, {"clip_high_threshold", false}}), clips,
       cispo},
      {"gspo", with({{"sequence_ratio_mask", true}}), clips, gspo},
      {"dro", sampled, {{"beta", true}}, dro},
  };
  return all;
}

const LossKind& kind_of(const std::string& name) {
  std::vector<std::string> names;
  for (const LossKind& kind : kinds()) {
    if (name == kind.name) return kind;
    names.emplace_back(kind.name);
  }
  if (name == "stable_reinforce") {
    throw DataError(
        "loss_fn 'stable_reinforce': its formula is not published; start the recipe with "
        "loss_fn=importance_sampling");
  }
  throw_error<DataError>("loss_fn '{}' is not one of {}", name, fmt::join(names, ", "));
}

void check_inputs(const LossKind& kind, const Datum& datum, std::size_t i) {
  if (datum.has_soft_targets() && !kind.takes_soft_targets) {
    throw_error<DataError>(
        "datum {}: loss_fn {} takes one target a token; several (soft targets) are for "
        "cross_entropy",
        i, kind.name);
  }
  for (const Input& input : kind.inputs) {
    if (input.required && !datum.inputs.contains(input.name))
      throw_error<DataError>("datum {}: loss_fn {} needs the input '{}'", i, kind.name, input.name);
  }
  for (const auto& [name, values] : datum.inputs) {
    const auto is_it = [&](const Input& input) { return name == input.name; };
    if (std::none_of(kind.inputs.begin(), kind.inputs.end(), is_it))
      throw_error<DataError>("datum {}: loss_fn {} has no input '{}'", i, kind.name, name);
    if (values.size() != datum.target_tokens.size()) {
      throw_error<DataError>("datum {}: '{}' has {} values for {} target tokens", i, name,
                             values.size(), datum.target_tokens.size());
    }
  }
}

}  // namespace

void check_loss(const Work& work) {
  const LossKind& kind = kind_of(work.loss_fn);
  for (const auto& [name, number] : work.config) {
    const auto is_it = [&, &key = name](const Number& known) { return key == known.name; };
    if (std::none_of(kind.numbers.begin(), kind.numbers.end(), is_it))
      throw_error<DataError>("loss_fn_config: loss_fn {} has no '{}'", kind.name, name);
    if (std::isnan(number)) throw_error<DataError>("loss_fn_config: '{}' is not a number", name);
  }
  for (const Number& number : kind.numbers) {
    if (number.required && !work.config.contains(number.name))
      throw_error<DataError>("loss_fn_config: loss_fn {} needs '{}'", kind.name, number.name);
  }
  for (std::size_t i = 0; i < work.data.size(); ++i) check_inputs(kind, work.data[i], i);
}

LossValues loss_of(const Work& work, std::span<const Datum> data,
                   std::span<const double> logprobs) {
  return kind_of(work.loss_fn).values(work, data, logprobs);
}

std::optional<std::vector<double>> constant_derivatives(const Work& work,
                                                        std::span<const Datum> data) {
  const LossKind& kind = kind_of(work.loss_fn);
  if (kind.constant_derivatives == nullptr) return std::nullopt;
  return kind.constant_derivatives(data);
}

}  // namespace heddle::tenants
