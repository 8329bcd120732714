#pragma once

// Inside src/config only.

#include <functional>
#include <string>
#include <vector>

#include <yaml-cpp/yaml.h>

#include "config/run_config.h"

namespace heddle::config {

/// An entry of `adapters:`, with the keys that it means.
struct AdapterEntry {
  struct Setting {
    std::string key;
    YAML::Node value;
  };
  std::string name;
  std::vector<Setting> settings;
};

/// Reads one; `at` says where a mark stands. Throws ConfigError.
AdapterEntry read_adapter_entry(const YAML::Node& node,
                                const std::function<std::string(const YAML::Mark&)>& at);

/// Throws ConfigError for a setting that a run of several adapters has no place for.
void require_for_several(const RunConfig& config);

}  // namespace heddle::config
