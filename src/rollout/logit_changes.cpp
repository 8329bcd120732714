#include "rollout/logit_changes.h"

#include <limits>

#include "rollout/request.h"

namespace heddle::rollout {

LogitChanges::LogitChanges(const Request& request)
    : options_(request.sampling), stop_ids_(request.stop_ids), min_tokens_(request.min_tokens) {
  const SamplingOptions& options = request.sampling;
  has_penalties_ = options.repetition_penalty != 1 || options.presence_penalty != 0 ||
                   options.frequency_penalty != 0;
  for (const auto& [id, bias] : options.logit_bias) tokens_[id].bias = bias;
  if (options.repetition_penalty == 1) return;
  for (const std::int32_t id : request.prompt) tokens_[id].repeats = true;
}

void LogitChanges::saw(std::int32_t id) {
  ++output_;
  if (!has_penalties_) return;
  Token& token = tokens_[id];
  token.repeats = true;
  ++token.count;
}

std::vector<LogitChange> LogitChanges::now() const {
  std::vector<LogitChange> changes;
  changes.reserve(tokens_.size());
  for (const auto& [id, token] : tokens_) {
    LogitChange change{id, static_cast<float>(token.bias), 1, 0};
    if (token.repeats) change.penalty = static_cast<float>(options_.repetition_penalty);
    if (token.count > 0) {
      change.taken =
          static_cast<float>(options_.presence_penalty +
                             options_.frequency_penalty * static_cast<double>(token.count));
    }
    changes.push_back(change);
  }
  if (output_ >= min_tokens_) return changes;
  for (const std::int32_t id : stop_ids_) {
    const auto is_it = [id](const LogitChange& change) { return change.id == id; };
    std::erase_if(changes, is_it);
    changes.push_back({id, -std::numeric_limits<float>::infinity(), 1, 0});
  }
  return changes;
}

}  // namespace heddle::rollout
