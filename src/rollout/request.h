#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nn/adapters.h"
#include "rollout/sampler.h"

namespace heddle::rollout {

/// One version of a set of adapters. A sequence keeps the version that it started with.
struct Adapter {
  std::string name;
  std::int64_t version = 0;
  std::shared_ptr<const nn::AdapterSet> set;  ///< Null: the base model.
};

/// Sampling options beyond the distribution of one token are those of the request.
struct Request {
  std::vector<std::int32_t> prompt;  ///< At least one token.
  std::int64_t max_new_tokens = 128;
  SamplingOptions sampling;  ///< Its seed is the request's own random stream.
  std::vector<std::int32_t>
      stop_ids;  ///< End of generation; the token itself is part of the output.
  std::vector<std::string> stop_strings;  ///< Cut from the text where the first of them begins.
  std::int64_t min_tokens = 0;            ///< No stop id or string ends before so many tokens.
  bool ignore_eos = false;                ///< Stop ids end nothing: for measurements.
  /// False: text has special tokens too, but the stop id that ends it.
  bool skip_special_tokens = true;
  std::int64_t priority = 0;  ///< Waiting requests with lower numbers start first.
  std::int64_t samples = 1;   ///< Answers to the prompt, which is read once. See seed_of_sample.
  std::int64_t top_logprobs = 0;  ///< Alternatives told of each token, see SampledToken::top.
  /// Tells the log-probabilities of the prompt, and so many alternatives of each token.
  std::optional<std::int64_t> prompt_logprobs = {};
  /// Empty, or for each token of the prompt but the first the ids whose log-probabilities in its
  /// place are told besides its own. Needs prompt_logprobs.
  std::vector<std::vector<std::int32_t>> prompt_targets = {};
  /// Draws told in the place of each token of the prompt but the first: from the model's
  /// distribution at the request's temperature, no other option enters. Needs prompt_logprobs.
  std::int64_t prompt_draws = 0;
  bool return_support = false;  ///< See SampledToken::support. Needs a top_k above 0.
  bool return_experts = false;  ///< See Completion::experts.
  /// Null: the engine's adapter at the time it starts. For the base model, an Adapter without set.
  std::shared_ptr<const Adapter> adapter = {};
  /// Keeps the state after the prompt and at the end, for prompts that go on from there (the next
  /// turn of a conversation), until the memory is wanted.
  bool keep_state = false;
  /// Number of a conversation from 0 on; sample i has that of the request plus i. The state at the
  /// end of an answer stays for the next request of its conversation alone, which takes it over if
  /// it goes on from there; until the memory is wanted, or Engine::end_conversation(). -1: none.
  std::int64_t conversation = -1;

  /// Targets in the place of the token after this one.
  std::span<const std::int32_t> targets_after(std::int64_t position) const {
    if (prompt_targets.empty()) return {};
    return prompt_targets[static_cast<std::size_t>(position)];
  }
};

enum class FinishReason { kStop, kLength, kAborted };

struct Completion {
  std::vector<std::int32_t> output_ids;
  std::vector<double> logprobs;                ///< [output_ids], of the model's own distribution.
  std::vector<std::int64_t> weights_versions;  ///< [output_ids], of the weights that drew each.
  std::string text;                            ///< Decoded as the request says.
  FinishReason finish_reason = FinishReason::kLength;
  std::int64_t sample = 0;               ///< Number of the answer in its request.
  std::int64_t adapter_version = 0;      ///< Of the adapter that it had from its start on.
  std::int64_t cached_tokens = 0;        ///< Prompt tokens found in a kept state.
  double queue_s = 0;                    ///< From its arrival to its start.
  double prompt_s = 0;                   ///< From its start to its first token.
  std::vector<double> sampled_logprobs;  ///< [output_ids], see SampledToken::sampled_logprob.
  std::vector<std::vector<TokenLogprob>> top_logprobs;  ///< [output_ids], if asked for.
  std::vector<std::vector<std::int32_t>> supports;      ///< [output_ids], if asked for.
  /// If asked for, the experts that the routers chose for the tokens of prompt and output when each
  /// was read first; none of the last one, which was not read. [tokens - 1][layers with
  /// experts][k], end to end. Empty for a model without experts.
  std::vector<std::uint16_t> experts;
  /// [prompt], of the first sample and if asked for; the first is NaN: nothing precedes it.
  std::vector<double> prompt_logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_top_logprobs;  ///< [prompt], the first is empty.
  /// Log-probabilities of Request::prompt_targets, for the first sample.
  std::vector<std::vector<double>> prompt_target_logprobs;
  /// [prompt - 1][prompt_draws], for the first sample.
  std::vector<std::vector<TokenLogprob>> prompt_draws;
};

}  // namespace heddle::rollout
