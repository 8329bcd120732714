// model.safetensors.index.json: refused with a DataError or ModelError, or a map of tensors to
// names of files that lie in the folder itself.
#include <cstdlib>
#include <string_view>

#include "base/errors.h"
#include "base/json.h"
#include "ckpt/weight_map.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto index = heddle::json::parse<nlohmann::json>(text);
    if (!index.is_object()) return 0;  // refused by the reader of the file
    for (const auto& [tensor, file] : heddle::ckpt::parse_weight_map(index, "index")) {
      if (file.empty() || file == "." || file == ".." ||
          file.find_first_of(std::string_view("/\0", 2)) != std::string::npos)
        std::abort();
    }
  } catch (const heddle::UserError&) {
  }
  return 0;
}
