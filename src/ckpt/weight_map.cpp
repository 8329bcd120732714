#include "ckpt/weight_map.h"

#include <filesystem>

#include "base/errors.h"
#include "base/json.h"
#include "base/quote.h"

namespace heddle::ckpt {

std::map<std::string, std::string> parse_weight_map(const nlohmann::json& index,
                                                    const std::string& file) {
  const auto found = index.find("weight_map");
  if (found == index.end() || !found->is_object() || found->empty()) {
    throw_error<ModelError>(
        "{}: 'weight_map' (an object of tensor name and file name) is missing or empty", file);
  }
  std::map<std::string, std::string> weight_map;
  for (const auto& [name, shard] : found->items()) {
    const std::filesystem::path value = shard.is_string() ? shard.get<std::string>() : "";
    // A name with a zero byte would be cut there by the system.
    const bool is_plain = !value.empty() && value != "." && value != ".." &&
                          value.filename() == value &&
                          value.native().find('\0') == std::string::npos;
    if (!is_plain) {
      throw_error<ModelError>(
          "{}: weight_map: '{}' is said to be in {}, which is no plain file name", file,
          text::shown(name), json::shown(shard));
    }
    weight_map.emplace(name, value.native());
  }
  return weight_map;
}

}  // namespace heddle::ckpt
