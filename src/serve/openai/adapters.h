#pragma once

#include <filesystem>
#include <functional>

#include "serve/http/request.h"
#include "serve/http/responder.h"
#include "serve/openai/service.h"

namespace heddle::serve::openai {

/// The folder that a caller's adapters lie under; empty: any folder.
using AdapterRoot = std::function<std::filesystem::path(const Caller&)>;

/// Loads an adapter's folder on the model's thread and adds it to the models under `name`. Then
/// calls `done` there, with what is wrong or "". A name is of letters, digits and ". _ - / :".
void load_adapter(Service& service, const std::string& name, const std::filesystem::path& folder,
                  std::function<void(const std::string& error)> done);

/// Told, from any thread, who did what to an adapter: "adapter_load" or "adapter_unload".
using AuditNote =
    std::function<void(const Caller&, const std::string& event, const std::string& adapter)>;

/// POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them. `note` may be empty.
void answer_load_adapter(Service& service, const AdapterRoot& root, const AuditNote& note,
                         const Request& request, const Responder& responder);
void answer_unload_adapter(Service& service, const AuditNote& note, const Request& request,
                           const Responder& responder);

}  // namespace heddle::serve::openai
