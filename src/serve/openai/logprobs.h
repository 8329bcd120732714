#pragma once

#include "data/tokenizer/tokenizer.h"
#include "serve/model/generation.h"
#include "serve/openai/error.h"

namespace heddle::serve::openai {

/// Characters that begin in a text, as clients count them.
std::size_t characters(std::string_view text);

/// Log-probabilities as the two APIs write them.
class Logprobs {
 public:
  /// `as_ids`: tokens are written "token_id:17", which tells apart those whose text is not UTF-8.
  Logprobs(const data::Tokenizer& tokenizer, bool as_ids)
      : tokenizer_(tokenizer), as_ids_(as_ids) {}

  std::string text(std::int32_t id) const;
  /// Chat: {"token", "logprob", "bytes", "top_logprobs"} of one token.
  Json chat_entry(std::int32_t id, double logprob, const std::vector<TokenLogprob>& top) const;

  /// Completions: {"tokens", "token_logprobs", "top_logprobs", "text_offset"}, filled token by
  /// token; `offset` is the length of the text before the first, in characters. A NaN is written
  /// null.
  static Json empty_table();
  void append(Json& table, std::int32_t id, double logprob, const std::vector<TokenLogprob>& top,
              std::size_t& offset) const;

  /// vLLM's prompt_logprobs: null for the first token, then {id: {"logprob", "rank",
  /// "decoded_token"}} of each; the rank is null beyond the alternatives.
  Json prompt_table(const std::vector<std::int32_t>& prompt, const GenerationResult& result) const;

 private:
  Json chat_token(std::int32_t id, double logprob) const;
  /// The text or, as OpenAI writes parts of a character, whose texts would be the same,
  /// "bytes:\xe2\x82".
  std::string key(std::int32_t id) const;

  const data::Tokenizer& tokenizer_;
  bool as_ids_;
};

}  // namespace heddle::serve::openai
