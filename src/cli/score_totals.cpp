#include "cli/score_totals.h"

#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace heddle::cli {

std::string ScoreTotals::to_json(double seconds) const {
  nlohmann::ordered_json json = {{"rows", rows}, {"tokens", tokens}, {"seconds", seconds}};
  if (has_tokens) {
    json["scored_tokens"] = scored;
    json["mean_nll"] = mean_loss();
    json["perplexity"] = std::exp(mean_loss());
  }
  if (has_answers) {
    json["answer_tokens"] = answer_tokens;
    json["answer_nll"] = answer_loss();
    json["answer_perplexity"] = std::exp(answer_loss());
  }
  if (has_entropy) json["mean_entropy"] = mean_entropy();
  return json.dump();
}

std::string ScoreTotals::to_text(double seconds) const {
  std::string text = fmt::format("{} rows, {} tokens in {:.1f} s", rows, tokens, seconds);
  if (has_tokens) {
    text += fmt::format(
        "; mean loss {:.6f}, perplexity {:.4f} over {} tokens, all but the first of each row",
        mean_loss(), std::exp(mean_loss()), scored);
  }
  if (has_answers) {
    text += fmt::format("; over the {} tokens of the answers {:.6f}, perplexity {:.4f}",
                        answer_tokens, answer_loss(), std::exp(answer_loss()));
  }
  if (has_entropy) text += fmt::format("; mean entropy {:.6f}", mean_entropy());
  return text;
}

}  // namespace heddle::cli
