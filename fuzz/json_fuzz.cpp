// The reader of all JSON that comes from strangers. What it takes is not deeper than its limit, so
// that printing it is safe, and is read again from its own text.
#include <cstdlib>
#include <string_view>

#include "base/errors.h"
#include "base/json.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto value = heddle::json::parse(text);
    heddle::json::shown(value);
    if (heddle::json::parse(value.dump()) != value) std::abort();
    if (heddle::json::parse<nlohmann::json>(text).size() != value.size()) std::abort();
    heddle::json::parse(text, {.depth = 4, .values = 100, .keeps_big_integers = true});
  } catch (const heddle::DataError&) {
  }
  return 0;
}
