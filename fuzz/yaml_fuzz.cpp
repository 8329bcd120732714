// A configuration file: read, or refused with a ConfigError.
#include <string_view>

#include "base/errors.h"
#include "config/config.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    heddle::config::parse(text, "run.yaml", {}, heddle::config::Completeness::kComplete);
  } catch (const heddle::ConfigError&) {
  }
  return 0;
}
