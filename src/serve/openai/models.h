#pragma once

#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "serve/model/wants_weights.h"
#include "serve/openai/error.h"

namespace heddle::serve::openai {

/// The models that requests can name: the base model and its adapters. All functions may be called
/// from any thread.
class Models {
 public:
  /// Finds weights by a name that the table does not have, for this caller.
  using Elsewhere = std::function<void(const std::string&, const Caller&, WantsWeights)>;

  Models(std::string base, std::int64_t max_context);
  /// Names that begin with `prefix` are looked for there. Called before any request.
  void look_also(std::string prefix, Elsewhere elsewhere) {
    prefix_ = std::move(prefix);
    elsewhere_ = std::move(elsewhere);
  }

  /// A later adapter of the same name takes the place of the former one for new requests.
  void add(const std::string& name, std::shared_ptr<const SamplerWeights> weights);
  /// False if there is none of the name.
  bool remove(const std::string& name);
  bool has(const std::string& name) const;

  /// Throws ApiError 404 for a name that is not known and can be nowhere else.
  void require(const std::string& name) const;
  /// Null for the base model. What is looked for elsewhere comes later, from another thread.
  void find(const std::string& name, const Caller& caller, WantsWeights wants) const;
  /// OpenAI's list of models, or one of them. Throws ApiError 404.
  Json list() const;
  Json describe(const std::string& name) const;
  std::vector<std::string> adapters() const;

 private:
  bool is_elsewhere(const std::string& name) const;

  struct Adapter {
    std::time_t created = 0;
    std::shared_ptr<const SamplerWeights> weights;
  };
  Json entry(const std::string& name, const Adapter* adapter) const;

  std::string base_;
  std::int64_t max_context_;
  std::time_t created_ = std::time(nullptr);
  std::string prefix_;
  Elsewhere elsewhere_;
  mutable std::mutex mutex_;
  std::map<std::string, Adapter> adapters_;
};

}  // namespace heddle::serve::openai
