#include "serve/tinker/kept_weights.h"

#include <algorithm>

#include "serve/tinker/checkpoints.h"

namespace heddle::serve::tinker {

KeptWeights::Weights KeptWeights::find(Recent& recent, const std::string& key) {
  const auto found = std::ranges::find(recent, key, &Recent::value_type::first);
  if (found == recent.end()) return nullptr;
  recent.splice(recent.begin(), recent, found);
  return found->second;
}

void KeptWeights::add(Recent& recent, const std::string& key, Weights weights, std::size_t most) {
  std::erase_if(recent, [&](const auto& entry) { return entry.first == key; });
  recent.emplace_front(key, std::move(weights));
  if (recent.size() > most) recent.pop_back();
}

KeptWeights::Weights KeptWeights::of_checkpoint(const std::string& folder) {
  return find(checkpoints_, folder);
}

void KeptWeights::add_checkpoint(const std::string& folder, Weights weights) {
  add(checkpoints_, folder, std::move(weights), most_);
}

KeptWeights::Weights KeptWeights::of_sampler(const std::string& run, const std::string& sampler) {
  const auto found = unnamed_.find(run);
  return found == unnamed_.end() ? nullptr : find(found->second, sampler);
}

std::vector<std::pair<std::string, KeptWeights::Weights>> KeptWeights::unnamed_of(
    const std::string& run) const {
  const auto found = unnamed_.find(run);
  if (found == unnamed_.end()) return {};
  return {found->second.rbegin(), found->second.rend()};
}

void KeptWeights::forget_session(const std::string& session) {
  std::erase_if(unnamed_, [&](const auto& of_run) { return session_of(of_run.first) == session; });
}

void KeptWeights::add_unnamed(const std::string& run, const std::string& sampler, Weights weights) {
  add(unnamed_[run], sampler, std::move(weights), kUnnamed);
}

}  // namespace heddle::serve::tinker
