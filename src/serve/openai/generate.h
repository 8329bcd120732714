#pragma once

#include "serve/http/request.h"
#include "serve/http/responder.h"
#include "serve/openai/service.h"

namespace heddle::serve::openai {

/// POST /inference/v1/generate, as vLLM has it: token ids in, token ids out, no text.
void answer_generate(Service& service, const Request& request, const Responder& responder);

}  // namespace heddle::serve::openai
