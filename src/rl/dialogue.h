#pragma once

#include <cstdint>
#include <string>

#include "config/run_config.h"
#include "data/answer/answer_format.h"
#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"
#include "rl/prompts.h"

namespace heddle::rl {

/// A policy's turns as messages of its chat template, and messages as the text that follows a turn.
class Dialogue {
 public:
  /// The tokenizer outlives it. Throws DataError for a template that cannot be parsed.
  Dialogue(const config::RunConfig& config, const data::Tokenizer& tokenizer);

  /// A turn as a message: {"role", "content", "reasoning_content"?, "tool_calls"?}, as OpenAI's API
  /// has it with the arguments of calls as objects. Null where the template shows neither reasoning
  /// nor calls. `before`: the text that the turn follows; `tools`: the row's, or null.
  Json message(const std::string& text, const std::string& before, const Json& tools) const;

  /// The text by which a list of messages follows a turn, up to where the policy's next turn
  /// begins. `last`: the turn's last token; the end of the turn is not repeated after it. Throws
  /// DataError.
  std::string reply(const Json& messages, std::int32_t last) const;

 private:
  const data::Tokenizer& tokenizer_;
  data::RowOptions reader_;
  data::Renderer renderer_;
  data::AnswerFormat format_;
};

}  // namespace heddle::rl
