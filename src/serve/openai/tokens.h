#pragma once

#include "serve/http/request.h"
#include "serve/http/responder.h"
#include "serve/openai/service.h"

namespace heddle::serve::openai {

/// POST /tokenize: the ids of a text or of a conversation's prompt, as vLLM answers.
void answer_tokenize(Service& service, const Request& request, const Responder& responder);
/// POST /detokenize.
void answer_detokenize(Service& service, const Request& request, const Responder& responder);

}  // namespace heddle::serve::openai
