#include "base/hugging_face_cache.h"

#include <cstdlib>
#include <string>

namespace heddle::files {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

Path hugging_face_home() {
  if (const std::string home = variable("HF_HOME"); !home.empty()) return home;
  const std::string cache = variable("XDG_CACHE_HOME");
  const Path base = cache.empty() ? Path(variable("HOME")) / ".cache" : Path(cache);
  return base / "huggingface";
}

Path hugging_face_cache() {
  const std::string cache = variable("HF_HUB_CACHE");
  return cache.empty() ? hugging_face_home() / "hub" : Path(cache);
}

}  // namespace heddle::files
