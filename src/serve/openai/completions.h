#pragma once

#include "serve/http/request.h"
#include "serve/http/responder.h"
#include "serve/openai/service.h"

namespace heddle::serve::openai {

/// POST /v1/completions.
void answer_completion(Service& service, const Request& request, const Responder& responder);

}  // namespace heddle::serve::openai
