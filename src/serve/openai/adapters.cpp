#include "serve/openai/adapters.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "base/log.h"
#include "serve/openai/fields.h"

namespace heddle::serve::openai {
namespace {

namespace fs = std::filesystem;

bool is_model_name(const std::string& name) {
  return !name.empty() && name.size() <= 128 && std::ranges::all_of(name, [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) ||
           std::string_view("._-/:").find(c) != std::string_view::npos;
  });
}

/// Tells adapters of one name that follow each other apart.
std::int64_t next_version() {
  static std::atomic<std::int64_t> version = 0;
  return ++version;
}

bool is_below(const fs::path& folder, const fs::path& root) {
  const fs::path real = fs::weakly_canonical(folder), top = fs::weakly_canonical(root);
  return std::mismatch(top.begin(), top.end(), real.begin(), real.end()).first == top.end();
}

}  // namespace

void load_adapter(Service& service, const std::string& name, const fs::path& folder,
                  std::function<void(const std::string&)> done) {
  if (!is_model_name(name)) {
    done(fmt::format(
        "'{}' is no name for a model: expected up to 128 letters, digits and . _ - / :", name));
    return;
  }
  service.model.run([&service, name, folder, done = std::move(done)](Backend& backend) {
    try {
      auto weights = std::make_shared<SamplerWeights>();
      weights->name = name;
      weights->version = next_version();
      weights->set = backend.load_snapshot(folder);
      service.models.add(name, std::move(weights));
      done("");
    } catch (const std::exception& error) {
      done(error.what());
    }
  });
}

void answer_load_adapter(Service& service, const AdapterRoot& root, const AuditNote& note,
                         const Request& request, const Responder& responder) {
  Fields fields = Fields::parse(request.body);
  const std::string name = fields.text("lora_name").value_or("");
  const std::string path = fields.text("lora_path").value_or("");
  const bool replaces = fields.boolean("load_inplace").value_or(false);
  fields.finish();
  if (name.empty()) throw_field("lora_name", "is missing");
  if (path.empty()) throw_field("lora_path", "is missing");
  if (service.models.has(name) && (!replaces || name == service.facts().name)) {
    throw_field("lora_name",
                "is '{}', which is a model already; unload it first, or set "
                "'load_inplace'",
                name);
  }
  const fs::path top = root ? root(request.caller) : fs::path();
  const fs::path folder = top / path;
  if (!top.empty() && !is_below(folder, top))
    throw_field("lora_path", "leads out of the folder that this key may read");
  load_adapter(service, name, folder,
               [responder, name, note, caller = request.caller](const std::string& error) {
                 if (error.empty()) {
                   if (note) note(caller, "adapter_load", name);
                   responder.answer(
                       200, fmt::format("Success: LoRA adapter '{}' added successfully.", name),
                       "text/plain; charset=utf-8");
                 } else {
                   // The reason holds paths of this host.
                   log::warning("the adapter '{}' is not loaded: {}", name, error);
                   responder.answer(
                       400, dump(error_object(400,
                                              "the adapter could not be loaded; the server's log "
                                              "has the reason",
                                              "lora_path")));
                 }
               });
}

void answer_unload_adapter(Service& service, const AuditNote& note, const Request& request,
                           const Responder& responder) {
  Fields fields = Fields::parse(request.body);
  const std::string name = fields.text("lora_name").value_or("");
  fields.only("lora_int_id", nullptr, "adapters are named by 'lora_name'");
  fields.finish();
  if (!service.models.remove(name)) {
    throw ApiError(404, fmt::format("The LoRA adapter '{}' is not loaded", name), "lora_name",
                   "model_not_found");
  }
  if (note) note(request.caller, "adapter_unload", name);
  responder.answer(200, fmt::format("Success: LoRA adapter '{}' removed successfully.", name),
                   "text/plain; charset=utf-8");
}

}  // namespace heddle::serve::openai
