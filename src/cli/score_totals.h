#pragma once

#include <cstdint>
#include <string>

namespace heddle::cli {

/// Counts of `score`.
struct ScoreTotals {
  bool has_tokens = false;   ///< A language model: tokens have a loss.
  bool has_answers = false;  ///< Tokens that training would learn were counted apart.
  bool has_entropy = false;
  std::int64_t rows = 0, tokens = 0;
  std::int64_t scored = 0;  ///< Tokens with a loss: all but the first of each row.
  double logprob_sum = 0, entropy_sum = 0;
  std::int64_t answer_tokens = 0;
  double answer_logprob_sum = 0, answer_weight = 0;  ///< Weighted as training weights them.

  /// Means in nats a token; 0 of nothing.
  double mean_loss() const { return mean(-logprob_sum, static_cast<double>(scored)); }
  double answer_loss() const { return mean(-answer_logprob_sum, answer_weight); }
  double mean_entropy() const { return mean(entropy_sum, static_cast<double>(scored)); }

  /// One JSON document, or one line for a reader.
  std::string to_json(double seconds) const;
  std::string to_text(double seconds) const;

 private:
  static double mean(double sum, double count) { return count > 0 ? sum / count : 0; }
};

}  // namespace heddle::cli
