#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "rollout/sampler.h"

namespace heddle::rollout {

struct Request;

/// Changes that a request's penalties, biases and least number of tokens make to its next token's
/// logits. They follow the tokens so far.
class LogitChanges {
 public:
  explicit LogitChanges(const Request& request);

  /// After a token of the output.
  void saw(std::int32_t id);
  std::vector<LogitChange> now() const;
  /// There are none now, nor after any token.
  bool are_none() const { return tokens_.empty() && !has_penalties_ && output_ >= min_tokens_; }

 private:
  struct Token {
    double bias = 0;
    bool repeats = false;    ///< It is in the prompt or the output.
    std::int64_t count = 0;  ///< In the output.
  };
  SamplingOptions options_;
  std::vector<std::int32_t> stop_ids_;  ///< Not drawn before `min_tokens_`.
  std::int64_t min_tokens_ = 0, output_ = 0;
  bool has_penalties_ = false;
  std::map<std::int32_t, Token> tokens_;
};

}  // namespace heddle::rollout
