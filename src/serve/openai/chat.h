#pragma once

#include "data/readers/row.h"
#include "serve/http/request.h"
#include "serve/http/responder.h"
#include "serve/openai/fields.h"
#include "serve/openai/service.h"

namespace heddle::serve::openai {

/// POST /v1/chat/completions.
void answer_chat(Service& service, const Request& request, const Responder& responder);

/// The fields of a request that decide on a conversation's prompt, and the prompt's text. Used by
/// /tokenize too.
struct ConversationPrompt {
  data::Row row;
  std::string text;
};
ConversationPrompt take_prompt(Service& service, Fields& fields);

}  // namespace heddle::serve::openai
