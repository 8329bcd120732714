#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"
#include "models/model.h"
#include "rollout/sampler.h"

namespace heddle::rollout {

struct Request {
  std::vector<std::int32_t> prompt;  ///< At least one token.
  std::int64_t max_new_tokens = 128;
  SamplingOptions sampling;
  std::vector<std::int32_t>
      stop_ids;  ///< End of generation; the token itself is part of the output.
  std::vector<std::string> stop_strings;  ///< Cut from the text where the first of them begins.
};

enum class FinishReason { kStop, kLength };

struct Completion {
  std::vector<std::int32_t> output_ids;
  std::vector<double> logprobs;  ///< [output_ids], of the model's own distribution.
  std::string text;              ///< Decoded without special tokens.
  FinishReason finish_reason = FinishReason::kLength;
};

struct EngineOptions {
  std::int64_t max_sequences = 16;     ///< Generated at the same time.
  std::int64_t prefill_tokens = 4096;  ///< Prompt tokens processed in one pass, at most.
};

/// Called for each piece of text of request `index` as it becomes certain (whole UTF-8, not a part
/// of a stop string).
using TextCallback = std::function<void(std::size_t index, const std::string& piece)>;

/// Generates all requests with continuous batching: a sequence that ends gives its slot to the next
/// request. Results are in the order of the requests and depend on neither batch size nor order.
/// Throws DataError for an empty prompt or an id outside the vocabulary.
std::vector<Completion> generate(models::Model& model,
                                 const std::shared_ptr<const data::Tokenizer>& tokenizer,
                                 const std::vector<Request>& requests, const EngineOptions& options,
                                 const TextCallback& on_text = {});

/// Where generation ends: eos of generation_config.json (`generation_eos`), the tokenizer's, and
/// the chat turn end.
std::vector<std::int32_t> end_tokens(const std::shared_ptr<const data::Tokenizer>& tokenizer,
                                     const std::vector<std::int64_t>& generation_eos);

/// Greedy answers to prompts, through the chat template if there is one, rendered as the run
/// renders its data: the samples of a training run.
std::vector<std::string> answer_prompts(models::Model& model,
                                        const std::shared_ptr<const data::Tokenizer>& tokenizer,
                                        const std::vector<std::string>& prompts,
                                        std::int64_t max_new_tokens,
                                        const data::RenderOptions& rendering);

}  // namespace heddle::rollout
