#pragma once

#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "serve/model/generation.h"
#include "serve/openai/error.h"

namespace heddle::serve::openai {

/// The models that requests can name: the base model and its adapters. All functions may be called
/// from any thread.
class Models {
 public:
  /// Weights of a name that the table does not have, for this caller; null: there are none.
  using Elsewhere =
      std::function<std::shared_ptr<const SamplerWeights>(const std::string&, const Caller&)>;

  Models(std::string base, std::int64_t max_context);
  void look_also(Elsewhere elsewhere) { elsewhere_ = std::move(elsewhere); }

  /// A later adapter of the same name takes the place of the former one for new requests.
  void add(const std::string& name, std::shared_ptr<const SamplerWeights> weights);
  /// False if there is none of the name.
  bool remove(const std::string& name);
  bool has(const std::string& name) const;

  /// Null for the base model. Throws ApiError 404 for a name that is not known.
  std::shared_ptr<const SamplerWeights> weights_of(const std::string& name,
                                                   const Caller& caller) const;
  /// OpenAI's list of models, or one of them. Throws ApiError 404.
  Json list() const;
  Json describe(const std::string& name) const;
  std::vector<std::string> adapters() const;

 private:
  struct Adapter {
    std::time_t created = 0;
    std::shared_ptr<const SamplerWeights> weights;
  };
  Json entry(const std::string& name, const Adapter* adapter) const;

  std::string base_;
  std::int64_t max_context_;
  std::time_t created_ = std::time(nullptr);
  Elsewhere elsewhere_;
  mutable std::mutex mutex_;
  std::map<std::string, Adapter> adapters_;
};

}  // namespace heddle::serve::openai
