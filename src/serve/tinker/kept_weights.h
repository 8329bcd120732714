#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "serve/model/generation.h"

namespace heddle::serve::tinker {

/// Weights in memory that samplers use: of checkpoints, which can be read again, and of saves
/// without a name, which are nowhere else.
class KeptWeights {
 public:
  using Weights = std::shared_ptr<const SamplerWeights>;
  /// Unnamed saves of one run that stay: clients sample from the last one, some from a few before.
  static constexpr std::size_t kUnnamed = 4;

  /// `checkpoints`: so many stay.
  explicit KeptWeights(std::size_t checkpoints) : most_(checkpoints) {}

  /// Null for a folder whose weights are not here.
  Weights of_checkpoint(const std::string& folder);
  void add_checkpoint(const std::string& folder, Weights weights);

  /// Null for a sampler whose weights are no longer here.
  Weights of_sampler(const std::string& run, const std::string& sampler);
  /// Sampler and weights of a run's unnamed saves, those used last at the end.
  std::vector<std::pair<std::string, Weights>> unnamed_of(const std::string& run) const;
  /// Weights that were used longest ago go.
  void add_unnamed(const std::string& run, const std::string& sampler, Weights weights);
  /// Frees what the session's runs saved without a name.
  void forget_session(const std::string& session);

 private:
  /// The ones used last are in front.
  using Recent = std::list<std::pair<std::string, Weights>>;
  static Weights find(Recent& recent, const std::string& key);
  static void add(Recent& recent, const std::string& key, Weights weights, std::size_t most);

  std::size_t most_;
  Recent checkpoints_;                     ///< By folder.
  std::map<std::string, Recent> unnamed_;  ///< By run, then by sampler.
};

}  // namespace heddle::serve::tinker
