#pragma once

#include <string>
#include <utility>
#include <vector>

#include "models/config.h"

namespace heddle::models {

/// Models that share a reader of config.json, names of weights and presets: one folder.
struct Family {
  std::vector<std::string> model_types;  ///< Values of `model_type` in config.json.
  /// Reads a config.json with one of these types. `source` names the file in messages. Throws
  /// ModelError naming the key: impossible or contradictory values, features that are not built.
  Config (*parse)(const Json& json, const std::string& source);
  /// Shapes known by name, each a complete config.json.
  std::vector<std::pair<std::string, Json>> (*presets)();
};

}  // namespace heddle::models
