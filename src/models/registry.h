#pragma once

#include <optional>
#include <string>
#include <vector>

#include "models/config.h"
#include "models/family.h"

/// All model families that are built.
namespace heddle::models {

/// The model that a parsed config.json describes. Throws ModelError for a `model_type` of no family
/// (listing those there are) and for what its family refuses. `source` names the file in messages.
Config parse_config(const Json& json, const std::string& source);

/// Titles of the families, joined by commas; for help.
std::string family_titles();

/// llama.cpp's form of a `model_type`; none if it has none that is known.
std::optional<GgufForm> gguf_form(const std::string& model_type);

/// Shapes known by name: the published sizes ("qwen3.5-0.8b", "qwen3-4b", ...) and small ones for
/// the CPU ("small-10m"), each as a flat config.json with every value written out. Throws
/// ConfigError listing the names.
Json preset_json(const std::string& name);
Config preset(const std::string& name);
std::vector<std::string> preset_names();
/// Presets that the examples of help texts name: small, of one machine, and of many.
inline constexpr const char *kSmallExample = "qwen3.5-0.8b", *kLargeExample = "qwen3.5-27b",
                            *kLargestExample = "qwen3.5-397b-a17b";

}  // namespace heddle::models
