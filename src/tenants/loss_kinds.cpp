#include "tenants/loss_kinds.h"

#include <algorithm>
#include <cmath>

#include "base/errors.h"
#include "base/quote.h"
#include "base/text.h"

namespace heddle::tenants {
namespace {

using Input = LossKind::Input;

const std::vector<LossKind>& kinds() {
  const std::vector<Input> sampled = {{"logprobs", true}, {"advantages", true}};
  const auto with = [&](std::vector<Input> more) {
    more.insert(more.begin(), sampled.begin(), sampled.end());
    return more;
  };
  const std::vector<Input> clips = {{kClipLow, false}, {kClipHigh, false}};
  static const std::vector<LossKind> all = {
      {"cross_entropy", {{"weights", false}}, {}, {}, true},
      {"importance_sampling", sampled, {}, {}},
      {"ppo", with(clips), clips, LossKind::Clips{0.8, 1.2, true}},
      {"cispo", with(clips), clips, LossKind::Clips{0, 4, false}},
      // Defaults of "Group Sequence Policy Optimization" (arXiv 2507.18071), section 5.1.
      {"gspo", with({{"sequence_ratio_mask", true}}), clips,
       LossKind::Clips{1 - 3e-4, 1 + 4e-4, true}},
      {"dro", sampled, {{"beta", true}}, {}},
  };
  return all;
}

/// `where` names the thresholds' place.
template <class Where>
void check_clips(const LossKind& kind, double low, double high, const Where& where) {
  const bool is_ordered = low >= 0 && low <= high;  // false for what is not a number
  if (!is_ordered)
    throw_error<DataError>("{}: loss_fn {} has {} {} and {} {}: expected 0 <= low <= high", where(),
                           kind.name, kClipLow, low, kClipHigh, high);
  if (kind.clips->around_one && (low > 1 || high < 1))
    throw_error<DataError>(
        "{}: loss_fn {} has {} {} and {} {}, which are ratios and not distances from 1: expected "
        "low <= 1 <= high",
        where(), kind.name, kClipLow, low, kClipHigh, high);
}

/// Thresholds that a datum brings.
void check_clips_of(const LossKind& kind, const Work& work, const Datum& datum, std::size_t i) {
  const auto low = datum.inputs.find(kClipLow), high = datum.inputs.find(kClipHigh);
  if (low == datum.inputs.end() && high == datum.inputs.end()) return;
  const auto number = [&](const char* name, double missing) {
    const auto found = work.config.find(name);
    return found == work.config.end() ? missing : found->second;
  };
  const double low_of_all = number(kClipLow, kind.clips->low),
               high_of_all = number(kClipHigh, kind.clips->high);
  for (std::size_t t = 0; t < datum.target_tokens.size(); ++t)
    check_clips(kind, low == datum.inputs.end() ? low_of_all : low->second[t],
                high == datum.inputs.end() ? high_of_all : high->second[t],
                [&] { return fmt::format("datum {}, target {}", i, t); });
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
    const auto is_it = [&, &key = name](const Input& input) { return key == input.name; };
    if (std::none_of(kind.inputs.begin(), kind.inputs.end(), is_it))
      throw_error<DataError>("datum {}: loss_fn {} has no input '{}'", i, kind.name, name);
    if (values.size() != datum.target_tokens.size()) {
      throw_error<DataError>("datum {}: '{}' has {} values for {} target tokens", i, name,
                             values.size(), datum.target_tokens.size());
    }
  }
}

void check_numbers(const LossKind& kind, const Work& work) {
  for (const auto& [name, number] : work.config) {
    const auto is_it = [&, &key = name](const Input& known) { return key == known.name; };
    if (std::none_of(kind.numbers.begin(), kind.numbers.end(), is_it)) {
      std::vector<std::string> names;
      for (const Input& known : kind.numbers) names.emplace_back(known.name);
      throw_error<DataError>("loss_fn_config: loss_fn {} has no '{}': expected {}", kind.name, name,
                             names.empty() ? "none" : fmt::format("{}", fmt::join(names, " or ")));
    }
    if (std::isnan(number)) throw_error<DataError>("loss_fn_config: '{}' is not a number", name);
  }
  for (const Input& number : kind.numbers) {
    if (number.required && !work.config.contains(number.name))
      throw_error<DataError>("loss_fn_config: loss_fn {} needs '{}'", kind.name, number.name);
  }
  if (const auto beta = work.config.find("beta"); beta != work.config.end()) {
    if (!(beta->second >= 0 && std::isfinite(beta->second)))
      throw_error<DataError>("loss_fn_config: 'beta' is {}: expected a finite number from 0 on",
                             beta->second);
  }
  if (!kind.clips) return;
  const auto low = work.config.find(kClipLow), high = work.config.find(kClipHigh);
  check_clips(kind, low == work.config.end() ? kind.clips->low : low->second,
              high == work.config.end() ? kind.clips->high : high->second,
              [] { return "loss_fn_config"; });
}

}  // namespace

const LossKind& loss_kind(const std::string& name) {
  std::vector<std::string> names;
  for (const LossKind& kind : kinds()) {
    if (name == kind.name) return kind;
    names.emplace_back(kind.name);
  }
  if (name == "stable_reinforce") {
    throw DataError(
        "loss_fn 'stable_reinforce' is not built, as its formula is not published: start the "
        "recipe with loss_fn=importance_sampling (asynchronous: AsyncConfig.loss_fn)");
  }
  throw_error<DataError>("loss_fn '{}' is not one of {}", text::shown(name, 60),
                         fmt::join(names, ", "));
}

void check_loss(const Work& work) {
  const LossKind& kind = loss_kind(work.loss_fn);
  check_numbers(kind, work);
  for (std::size_t i = 0; i < work.data.size(); ++i) {
    check_inputs(kind, work.data[i], i);
    if (kind.clips) check_clips_of(kind, work, work.data[i], i);
  }
}

}  // namespace heddle::tenants
