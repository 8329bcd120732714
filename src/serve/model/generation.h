#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace heddle::adapters {
class LoraSet;
}

namespace heddle::serve {

/// One version of an adapter, as it was when it was saved or loaded; no later step changes it.
struct SamplerWeights {
  std::string name;          ///< Adapter's name, for messages and kept states.
  std::int64_t version = 0;  ///< Tells versions of one name apart.
  std::shared_ptr<const adapters::LoraSet> set;
};

/// A client's request to the model: answers to one prompt.
struct Generation {
  std::vector<std::int32_t> prompt;
  std::int64_t max_tokens = 0;
  std::int64_t samples = 1;
  double temperature = 1;  ///< 0: the most likely token.
  double top_p = 1, min_p = 0;
  std::int64_t top_k = 0;  ///< 0: all.
  std::uint64_t seed = 0;
  double repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  std::map<std::int32_t, double> logit_bias;
  std::vector<std::int32_t> stop_ids;     ///< The token that ends an answer is part of it.
  std::vector<std::string> stop_strings;  ///< Cut from the text where the first of them begins.
  std::int64_t min_tokens = 0;            ///< No stop id is drawn before so many.
  bool ignore_eos = false;
  bool skip_special_tokens = true;              ///< False: the text has them too.
  std::int64_t priority = 0;                    ///< Lower numbers start first.
  std::int64_t top_logprobs = 0;                ///< Alternatives told of each drawn token.
  std::optional<std::int64_t> prompt_logprobs;  ///< For the prompt's tokens, with so many others.
  /// See rollout::Request::prompt_targets.
  std::vector<std::vector<std::int32_t>> prompt_targets;
  std::int64_t prompt_draws = 0;                  ///< See rollout::Request::prompt_draws.
  bool keep_state = false;                        ///< A later prompt may go on from this one.
  std::shared_ptr<const SamplerWeights> weights;  ///< Null: the base model.
};

struct TokenLogprob {
  std::int32_t id = 0;
  double logprob = 0;
};

/// A token of an answer under way.
struct GeneratedToken {
  std::int64_t sample = 0;
  std::int32_t id = 0;
  double logprob = 0;
  std::vector<TokenLogprob> top;
  std::string text;  ///< Text that became certain: whole UTF-8, no part of a stop string.
};

enum class GenerationEnd { kStop, kLength };

struct GeneratedSequence {
  std::vector<std::int32_t> ids;
  std::vector<double> logprobs;                ///< [ids], of the model's own distribution.
  std::vector<std::vector<TokenLogprob>> top;  ///< [ids], if asked for.
  std::string text;                            ///< Without the stop id.
  GenerationEnd end = GenerationEnd::kLength;
};

struct GenerationResult {
  std::vector<GeneratedSequence> samples;
  std::vector<double> prompt_logprobs;                ///< [prompt] if asked for; the first is NaN.
  std::vector<std::vector<TokenLogprob>> prompt_top;  ///< [prompt]; the first is empty.
  std::vector<std::vector<double>> prompt_target_logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_draws;
  std::int64_t cached_tokens = 0;  ///< Prompt tokens found in a kept state.
  double queue_s = 0;              ///< From its arrival to its start.
  double prompt_s = 0;             ///< From its start to its first token.
};

/// Told on the model's thread, which must not be kept.
struct GenerationEvents {
  std::function<void(const GeneratedToken&)> on_token;  ///< May be empty.
  std::function<void(GenerationResult&&)> on_done;
  /// `is_users`: the request was wrong, not the server.
  std::function<void(const std::string& message, bool is_users)> on_failed;
};

using GenerationId = std::int64_t;

}  // namespace heddle::serve
