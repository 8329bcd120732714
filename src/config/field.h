#pragma once

// Inside src/config only: one row of the declarative table from which parsing, validation and all
// printing come.

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <yaml-cpp/yaml.h>
#include <nlohmann/json.hpp>

#include "config/run_config.h"

namespace heddle::config {

using Json = nlohmann::ordered_json;

/// A value does not fit its key. The loader adds file, line and key.
struct BadValue {
  std::string expected;  ///< "a number >= 0"
  std::string found;     ///< "'fast'", "a list"
  std::string hint;      ///< "did you mean 'adamw'?" or ""
};

/// How much of a key's value is for nobody else.
enum class Secret { kNone, kPassword, kWhole };

/// The value as it may be printed, stored and compared.
Json without_secret(Json value, Secret secret);

struct Field {
  std::string key;   ///< dotted: "optim.lr"
  std::string type;  ///< "number >= 0", "adamw|sgd"
  std::string doc;
  std::vector<std::string> aliases;  ///< what other programs call it, for "did you mean"
  bool required = false;
  Secret secret = Secret::kNone;
  std::function<void(RunConfig&, const YAML::Node&)> set;  ///< throws BadValue
  std::function<Json(const RunConfig&)> get;
};

/// Keys the table cannot list: kernels.<operator>, data.template_args.<name>.
struct OpenKeys {
  std::string placeholder;  ///< "<operator>"
  std::string type;
  std::string doc;
  std::function<void(RunConfig&, const std::string& name, const YAML::Node&)> set;
  std::function<Json(const RunConfig&)> get;  ///< an object
  std::function<void(RunConfig&)> clear;      ///< leaves none
};

struct Section {
  std::string key;  ///< "optim", "ckpt.export"
  std::string doc;
  std::vector<Field> fields;
  std::string scalar_key;  ///< the key meant when the section is written as one scalar, or ""
  std::optional<OpenKeys> open;
};

/// All sections; a nested one ("data.fields") follows its parent.
const std::vector<Section>& schema();

const Section* find_section(std::string_view key);
const Field* find_field(std::string_view key);

/// "a list", "a mapping", "nothing" or the quoted scalar, shortened.
std::string describe(const YAML::Node& node);

/// Flow-style YAML of a value: [a, b], {path: x, weight: 2}, plain or quoted scalars.
std::string to_flow_yaml(const Json& value);

}  // namespace heddle::config
