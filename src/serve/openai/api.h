#pragma once

#include <string>
#include <vector>

#include "serve/http/router.h"
#include "serve/openai/adapters.h"
#include "serve/openai/service.h"

namespace heddle::serve::openai {

struct ApiOptions {
  std::string version;  ///< The program's, for /version.
  AdapterRoot adapter_root;
  AuditNote note = {};
};

/// The routes of the inference API that OpenAI's clients speak, with vLLM's additions. `service`
/// outlives the server.
std::vector<Route> routes(Service& service, const ApiOptions& options);

}  // namespace heddle::serve::openai
