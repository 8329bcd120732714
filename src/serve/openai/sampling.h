#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "serve/model/backend.h"
#include "serve/openai/fields.h"

namespace heddle::serve::openai {

/// Fields that chat and text completions share: how tokens are drawn and how they are shown.
struct Sampling {
  std::string model;
  Generation generation;  ///< Without prompt and weights; max_tokens as asked for, if it was.
  std::optional<std::int64_t> max_tokens;
  bool streams = false;
  bool streams_usage = false;  ///< A last chunk with the usage of all choices.
  bool includes_stop = false;  ///< The stop string is part of the text.
  bool returns_token_ids = false;
  bool shows_tokens_as_ids = false;  ///< "token_id:17" for a token's text in log-probabilities.
  std::optional<std::int64_t> truncate_prompt_tokens;  ///< The last so many count.
};

/// Takes the fields of both APIs and the extensions of vLLM. Throws ApiError that names the field.
/// `caller`: who may go before others needs the scope admin.
Sampling take_sampling(Fields& fields, const ModelFacts& facts, const Caller& caller);

/// The generation of one prompt, which is cut if the request says so. Throws ApiError for one that
/// is empty or longer than the model's context allows; `usual_max_tokens`: where the request names
/// none (0: what is left).
Generation generation_of(const Sampling& sampling, std::vector<std::int32_t> prompt,
                         const ModelFacts& facts, std::int64_t usual_max_tokens);

}  // namespace heddle::serve::openai
