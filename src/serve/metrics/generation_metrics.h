#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "serve/metrics/registry.h"

namespace heddle::serve {

/// Metrics of generation under the names that vLLM gives them, so that its dashboards work.
class GenerationMetrics {
 public:
  GenerationMetrics(Registry& registry, std::string model_name);

  /// A request whose answer was not watched token by token, `seconds` after it came.
  void answered(std::int64_t prompt_tokens, std::int64_t tokens, double seconds);
  /// Tokens of a prompt that were found in a kept state.
  void cached(std::int64_t prompt_tokens, std::int64_t cached_tokens);
  /// Times of a request up to its first token, as GenerationResult has them.
  void begun(double queue_s, double prompt_s);
  /// `reason`: as of Request::ended().
  void ended(const std::string& reason);

  /// One request, from its arrival on. Its calls come from one thread at a time.
  class Request {
   public:
    Request(GenerationMetrics& metrics, std::int64_t prompt_tokens);
    void token();  ///< An answer got a token.
    /// `reason`: stop, length, abort or error; one call for each answer.
    void ended(const std::string& reason);

   private:
    using Clock = std::chrono::steady_clock;
    GenerationMetrics& metrics_;
    Clock::time_point arrival_ = Clock::now();
    std::optional<Clock::time_point> first_, last_;
    std::int64_t prompt_tokens_;
  };

 private:
  Registry& registry_;
  Labels labels_;
};

}  // namespace heddle::serve
