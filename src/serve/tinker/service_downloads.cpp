#include <cmath>
#include <filesystem>

#include "serve/tinker/service.h"

// Files of external weights, for clients that fetch them by plain addresses.
namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

constexpr double kDownload_s = 3600;  ///< The SDK asks again before an address ends.

/// Where the client reached the server.
std::string address_of(const Request& request) {
  const std::string_view scheme = request.header("x-forwarded-proto");
  return fmt::format("{}://{}", scheme == "https" ? "https" : "http", request.header("host"));
}

std::string query_of(const Request& request, const char* name) {
  const auto found = request.query.find(name);
  return found == request.query.end() ? "" : found->second;
}

}  // namespace

std::string Service::download_signature(const Checkpoint& checkpoint, const std::string& file,
                                        const std::string& expires) const {
  // The folder's name is drawn at random: weights that replace others need other signatures.
  return signature_hex(download_key_,
                       fmt::format("{}\n{}\n{}", checkpoint.folder.string(), file, expires));
}

void Service::external_weights_urls(const Request& request, const Responder& responder) {
  const Checkpoint found = checkpoints_.find(
      fmt::format("tinker://{}/{}", request.parameters.at("run"), request.parameters.at("id")),
      request.caller.tenant);
  if (found.kind != Checkpoint::Kind::kExternal)
    throw_http(400, "{} has no download addresses: save_weights_external makes weights that have",
               found.path);
  const double until = std::floor(now_s() + kDownload_s);
  const std::string expires = fmt::format("{:.0f}", until);
  json urls = json::object();
  for (const auto& entry : std::filesystem::directory_iterator(found.folder)) {
    const std::string file = entry.path().filename();
    if (!entry.is_regular_file() || !is_plain_name(file)) continue;
    urls[file] =
        fmt::format("{}/api/v1/downloads/{}/{}/{}?expires={}&signature={}", address_of(request),
                    found.run, found.name, file, expires, download_signature(found, file, expires));
  }
  audit_.note(request.caller, "checkpoint_read", found.path);
  responder.answer(200, dump({{"urls", urls}, {"expires", as_utc(until)}}));
}

void Service::download(const Request& request, const Responder& responder) {
  const std::string& file = request.parameters.at("file");
  const Checkpoint found = checkpoints_.signed_for(
      fmt::format("tinker://{}/{}/{}", request.parameters.at("run"),
                  segment_of(Checkpoint::Kind::kExternal), request.parameters.at("name")));
  const std::string expires = query_of(request, "expires");
  if (!is_same_secret(query_of(request, "signature"), download_signature(found, file, expires)) ||
      std::strtod(expires.c_str(), nullptr) < now_s())
    throw HttpError(403, "this address is not signed, or it has ended: ask for a new one");
  responder.answer_file(found.folder / file);
}

}  // namespace heddle::serve::tinker
