#pragma once

#include <cstdint>

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
  std::int64_t jobs = 0;  ///< Training, loading and saving that wait.
  double cache_use = 0;   ///< Part of the memory for keys and values that is taken.
};

/// Passes of the model and what waits for them. Calls may come from any thread.
class PassMetrics {
 public:
  /// `registry` outlives it.
  explicit PassMetrics(Registry& registry);
  void passed(const ModelPass& pass);
  void queued(const ModelQueue& queue);

 private:
  Registry& registry_;
};

}  // namespace heddle::serve
