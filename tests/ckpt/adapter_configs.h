#pragma once

#include <nlohmann/json.hpp>

#include "ckpt/adapter_config.h"

namespace heddle::ckpt {

/// adapter_config.json of a small adapter, with `changes`.
inline nlohmann::ordered_json config_json(const nlohmann::ordered_json& changes = {}) {
  nlohmann::ordered_json json = {{"peft_type", "LORA"},
                                 {"r", 4},
                                 {"lora_alpha", 8},
                                 {"target_modules", {"q_proj", "up_proj"}}};
  if (changes.is_object()) json.update(changes);
  return json;
}

inline AdapterConfig parse(const nlohmann::ordered_json& changes) {
  return AdapterConfig::from_json(config_json(changes), "adapter_config.json");
}

}  // namespace heddle::ckpt
