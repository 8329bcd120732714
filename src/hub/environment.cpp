#include "hub/environment.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <system_error>

#include "base/hugging_face_cache.h"
#include "base/secret.h"
#include "base/text.h"

namespace heddle::hub {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string without_slash(std::string url) {
  while (url.ends_with('/')) url.pop_back();
  return url;
}

bool is_true(std::string value) {
  std::transform(value.begin(), value.end(), value.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return value == "1" || value == "ON" || value == "YES" || value == "TRUE";
}

/// The address that the environment names, with a password that it may hold.
std::string named_endpoint(Hub hub) {
  if (hub == Hub::kHuggingFace) {
    const std::string url = without_slash(variable("HF_ENDPOINT"));
    return url.empty() ? "https://huggingface.co" : url;
  }
  const std::string domain = without_slash(variable("MODELSCOPE_DOMAIN"));
  if (domain.empty()) return "https://www.modelscope.cn";
  return domain.find("://") == std::string::npos ? "https://" + domain : domain;
}

}  // namespace

std::string endpoint(Hub hub) { return text::split_user(named_endpoint(hub)).rest; }

std::string endpoint_user(Hub hub) { return text::split_user(named_endpoint(hub)).user; }

std::string token(Hub hub) {
  if (hub == Hub::kModelScope) return variable("MODELSCOPE_API_TOKEN");
  for (const char* name : {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}) {
    const std::string value = variable(name);
    if (!value.empty()) return std::string(text::trim(value));
  }
  const std::string stored = variable("HF_TOKEN_PATH");
  const Path file = stored.empty() ? files::hugging_face_home() / "token" : Path(stored);
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(file, ignored)) return "";
  return std::string(text::trim(files::read(file, {"a hub's token", 4096})));
}

bool is_offline() {
  return is_true(variable("HF_HUB_OFFLINE")) || is_true(variable("TRANSFORMERS_OFFLINE"));
}

std::string certificate_file() {
  for (const char* name : {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"}) {
    const std::string value = variable(name);
    if (!value.empty()) return value;
  }
  return "";
}

Path modelscope_cache() {
  const std::string cache = variable("MODELSCOPE_CACHE");
  return cache.empty() ? Path(variable("HOME")) / ".cache" / "modelscope" / "hub" : Path(cache);
}

}  // namespace heddle::hub
