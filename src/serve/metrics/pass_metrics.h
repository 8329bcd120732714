#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "serve/metrics/registry.h"

namespace heddle::serve {

/// A pass of the model, with what shared it.
struct ModelPass {
  enum class Kind { kPrompt, kDecode, kTrain };
  Kind kind = Kind::kPrompt;
  bool recorded = false;  ///< Replayed as a graph, not queued launch by launch.
  std::int64_t sequences = 0, tokens = 0;
  std::int64_t sets = 0;  ///< Different sets of adapters, the base model among them.
};

/// Answers that wait for the model, and those that it works on.
struct ModelQueue {
  std::int64_t waiting = 0, running = 0;
  std::int64_t jobs = 0;           ///< Training, loading and saving that wait.
  double cache_use = 0;            ///< Part of the memory for keys and values that is taken.
  std::int64_t interruptions = 0;  ///< Answers that gave their memory to others, so far.
  std::set<std::string> running_adapters = {}, waiting_adapters = {};
};

/// Passes of the model and what waits for them. Calls may come from any thread.
class PassMetrics {
 public:
  /// `registry` outlives it. `most_adapters`: that one pass may have.
  PassMetrics(Registry& registry, std::int64_t most_adapters);
  void passed(const ModelPass& pass);
  void queued(const ModelQueue& queue);

 private:
  void told_adapters(const ModelQueue& queue);

  Registry& registry_;
  std::string most_adapters_;
  /// Adapters of the last queue, of the thread that tells them.
  std::optional<std::pair<std::set<std::string>, std::set<std::string>>> adapters_;
  std::int64_t interruptions_ = 0;
};

}  // namespace heddle::serve
