#include "serve/openai/models.h"

#include <utility>

#include "base/quote.h"

namespace heddle::serve::openai {
namespace {

std::string unknown(const std::string& name) {
  return fmt::format("The model '{}' does not exist; GET /v1/models lists those that do",
                     text::shown(name));
}

[[noreturn]] void throw_unknown(const std::string& name) {
  throw ApiError(404, unknown(name), "model", kUnknownModel);
}

}  // namespace

Models::Models(std::string base, std::int64_t max_context)
    : base_(std::move(base)), max_context_(max_context) {}

void Models::add(const std::string& name, std::shared_ptr<const SamplerWeights> weights) {
  const std::lock_guard lock(mutex_);
  adapters_[name] = {std::time(nullptr), std::move(weights)};
}

bool Models::remove(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return adapters_.erase(name) > 0;
}

bool Models::has(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return name == base_ || adapters_.contains(name);
}

bool Models::is_elsewhere(const std::string& name) const {
  return elsewhere_ && name.starts_with(prefix_);
}

void Models::require(const std::string& name) const {
  if (!has(name) && !is_elsewhere(name)) throw_unknown(name);
}

void Models::find(const std::string& name, const Caller& caller, WantsWeights wants) const {
  if (name == base_) return wants.ready(nullptr);
  std::shared_ptr<const SamplerWeights> weights;
  {
    const std::lock_guard lock(mutex_);
    const auto found = adapters_.find(name);
    if (found != adapters_.end()) weights = found->second.weights;
  }
  if (weights) return wants.ready(std::move(weights));
  if (!is_elsewhere(name)) return wants.failed(404, unknown(name));
  elsewhere_(name, caller, std::move(wants));
}

Json Models::entry(const std::string& name, const Adapter* adapter) const {
  Json entry = {{"id", name},
                {"object", "model"},
                {"created", adapter == nullptr ? created_ : adapter->created},
                {"owned_by", "heddle"},
                {"root", base_},
                {"parent", adapter == nullptr ? Json() : Json(base_)},
                {"max_model_len", max_context_}};
  return entry;
}

Json Models::list() const {
  const std::lock_guard lock(mutex_);
  Json data = Json::array({entry(base_, nullptr)});
  for (const auto& [name, adapter] : adapters_) data.push_back(entry(name, &adapter));
  return {{"object", "list"}, {"data", std::move(data)}};
}

Json Models::describe(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  if (name == base_) return entry(name, nullptr);
  const auto found = adapters_.find(name);
  if (found == adapters_.end()) throw_unknown(name);
  return entry(name, &found->second);
}

std::vector<std::string> Models::adapters() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, adapter] : adapters_) names.push_back(name);
  return names;
}

}  // namespace heddle::serve::openai
