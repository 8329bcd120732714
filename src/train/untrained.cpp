#include "train/untrained.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/text.h"
#include "ops/autograd.h"
#include "ops/optimizer_step/optimizer_step.h"
#include "train/optimizer.h"

namespace heddle::train {
namespace {

/// Stands between the names of a message.
constexpr char kSeparator = '\n';
/// Names that the warning lists.
constexpr std::size_t kNamed = 6;

}  // namespace

std::vector<bool> Optimizer::touched() const {
  std::vector<bool> touched(slots_.size());
  const auto look = [&](const auto& evidence_of) {
    std::vector<std::size_t> places;
    std::vector<at::Tensor> evidence;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const at::Tensor& found = evidence_of(slots_[i]);
      if (touched[i] || !found.defined()) continue;
      places.push_back(i);
      evidence.push_back(found);
    }
    const std::vector<bool> are_zero = ops::are_zero(evidence);
    for (std::size_t i = 0; i < places.size(); ++i) touched[places[i]] = !are_zero[i];
  };
  look([](const Slot& slot) -> const at::Tensor& {
    if (slot.largest_gradient.defined()) return slot.largest_gradient;
    // A block of codes is zero where its scale, the largest magnitude in it, is.
    if (slot.exp_avg_scale.defined()) return slot.exp_avg_scale;
    return slot.is_muon ? slot.momentum : slot.exp_avg;
  });
  // With optim.betas of 0 the first moment knows the last gradient alone.
  look([](const Slot& slot) -> const at::Tensor& {
    return slot.exp_avg_sq_scale.defined() ? slot.exp_avg_sq_scale : slot.exp_avg_sq;
  });
  return touched;
}

Optimizer::Untrained Optimizer::untrained() {
  const ops::NoGradient guard;
  const std::vector<bool> touched = this->touched();
  // A gradient may still come where none has.
  gathers_ = std::none_of(touched.begin(), touched.end(), [](bool one) { return one; });
  const comm::Group& owners = ranks_.owners;
  // Each rank tells how many tensors it counts, so that every one is counted once, and which of
  // its own it knows no gradient of.
  std::int64_t counted = 0;
  std::string mine;
  std::set<std::string> reached;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const nn::Parameter& parameter = *slots_[i].parameter;
    if (ranks_.stage.rank() == 0 && !parameter.is_copy()) ++counted;
    if (touched[i]) {
      reached.insert(parameter.name());
    } else if (slots_[i].owned.numel() > 0) {
      mine += kSeparator + parameter.name();
    }
  }
  Untrained result;
  std::vector<std::string> suspects;
  std::set<std::string> known;
  const std::vector<std::string> messages =
      owners.all_gather_objects(std::to_string(counted) + mine);
  for (const std::string& message : messages) {
    const std::vector<std::string> parts = text::split(message, kSeparator);
    result.of += std::stoll(parts.front());
    suspects.insert(suspects.end(), parts.begin() + 1, parts.end());
  }
  std::erase_if(suspects, [&](const std::string& name) { return !known.insert(name).second; });
  if (suspects.empty()) return result;
  // Another rank's rows may have had one: an embedding's rows of words that do not occur have none.
  std::string votes;
  for (const std::string& name : suspects) votes += reached.contains(name) ? '1' : '0';
  const std::vector<std::string> all_votes = owners.all_gather_objects(votes);
  for (std::size_t i = 0; i < suspects.size(); ++i) {
    const auto denies = [&](const std::string& of_rank) { return of_rank.at(i) == '1'; };
    if (std::none_of(all_votes.begin(), all_votes.end(), denies))
      result.names.push_back(std::move(suspects[i]));
  }
  return result;
}

std::string UntrainedWatch::after_step(Optimizer& optimizer, double lr, double norm) {
  if (has_looked_ || lr == 0) return {};
  ++updates_;
  if (norm != 0) ++with_gradient_;
  if (with_gradient_ == 0 && updates_ == kSteps) return told_of(optimizer, updates_);
  return with_gradient_ == kSteps ? look(optimizer) : std::string();
}

std::string UntrainedWatch::at_end(Optimizer& optimizer) {
  // A longer run without any gradient was told before.
  const bool is_enough =
      with_gradient_ == 0 ? updates_ >= kLeast && updates_ < kSteps : with_gradient_ >= kLeast;
  return !has_looked_ && is_enough ? look(optimizer) : std::string();
}

std::string UntrainedWatch::look(Optimizer& optimizer) {
  has_looked_ = true;
  return told_of(optimizer, updates_);
}

std::string UntrainedWatch::told_of(Optimizer& optimizer, std::int64_t steps) {
  const Optimizer::Untrained found = optimizer.untrained();
  if (found.names.empty()) return {};
  return fmt::format(
      "{} of {} trained tensors had no gradient but zero in {} steps and are, but for weight "
      "decay, as they were at the start: {}. Look whether the objective and the data reach them "
      "(experts "
      "that no token chose, texts of one token, rewards that are all alike); leave out what is not "
      "to be trained (train.freeze, adapter.targets); if nothing explains it, report a defect",
      found.names.size(), found.of, steps, text::list_some(found.names, kNamed));
}

}  // namespace heddle::train
