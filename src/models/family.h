#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "models/config.h"

namespace heddle::models {

/// How llama.cpp's files name and store models of one type.
struct GgufForm {
  std::string architecture;
  bool is_hybrid = false;       ///< With gated delta layers; norms are stored as weight - 1.
  bool orders_v_heads = false;  ///< Value heads go from grouped by key head to tiled.
};

/// Models that share a reader of config.json, names of weights and presets: one folder.
struct Family {
  std::string title;                     ///< Its models as people call them.
  std::vector<std::string> model_types;  ///< Values of `model_type` in config.json.
  /// Reads a config.json with one of these types. `source` names the file in messages. Throws
  /// ModelError naming the key: impossible or contradictory values, features that are not built.
  Config (*parse)(const Json& json, const std::string& source);
  /// Shapes known by name, each a complete config.json.
  std::vector<std::pair<std::string, Json>> (*presets)();
  std::map<std::string, GgufForm> gguf_forms;  ///< By model_type.
};

}  // namespace heddle::models
