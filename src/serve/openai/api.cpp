#include "serve/openai/api.h"

#include <utility>

#include "serve/openai/chat.h"
#include "serve/openai/completions.h"
#include "serve/openai/generate.h"
#include "serve/openai/tokens.h"

namespace heddle::serve::openai {

std::vector<Route> routes(Service& service, const ApiOptions& options) {
  std::vector<Route> routes;
  const auto add = [&](const char* method, const char* pattern, const char* scope,
                       Handler handler) {
    Route route{method, pattern, answering(std::move(handler)), error_body, scope};
    // Long prompts are rendered and tokenised there.
    route.on_worker = route.method == "POST";
    routes.push_back(std::move(route));
  };
  using Answer = void (*)(Service&, const Request&, const Responder&);
  const auto with = [&service](Answer answer) {
    return [&service, answer](const Request& request, const Responder& responder) {
      answer(service, request, responder);
    };
  };
  add("POST", "/v1/chat/completions", "sample", with(answer_chat));
  add("POST", "/v1/completions", "sample", with(answer_completion));
  add("POST", "/inference/v1/generate", "sample", with(answer_generate));
  for (Route& route : routes) route.cost = Cost::kGeneration;
  add("POST", "/tokenize", "sample", with(answer_tokenize));
  add("POST", "/detokenize", "sample", with(answer_detokenize));
  add("GET", "/v1/models", "sample", [&service](const Request&, const Responder& responder) {
    responder.answer(200, dump(service.models.list()));
  });
  // Names of models hold slashes.
  add("GET", "/v1/models/{name+}", "sample",
      [&service](const Request& request, const Responder& responder) {
        responder.answer(200, dump(service.models.describe(request.parameters.at("name"))));
      });
  add("POST", "/v1/load_lora_adapter", "admin",
      [&service, options](const Request& request, const Responder& responder) {
        answer_load_adapter(service, options.adapter_root, options.note, request, responder);
      });
  add("POST", "/v1/unload_lora_adapter", "admin",
      [&service, options](const Request& request, const Responder& responder) {
        answer_unload_adapter(service, options.note, request, responder);
      });
  const auto add_public = [&](const char* pattern, Handler handler) {
    add("GET", pattern, "", std::move(handler));
    routes.back().is_public = true;
  };
  add_public("/health",
             [](const Request&, const Responder& responder) { responder.answer(200, ""); });
  add_public("/version", [version = options.version](const Request&, const Responder& responder) {
    responder.answer(200, dump({{"version", version}}));
  });
  return routes;
}

}  // namespace heddle::serve::openai
