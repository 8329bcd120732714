// adapter_config.json of PEFT: refused with a ModelError or DataError, or a configuration that
// answers for every module and is read again from its own text.
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "base/errors.h"
#include "base/json.h"
#include "base/log.h"
#include "ckpt/adapter_config.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  heddle::log::set_level(heddle::log::Level::kError);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  using heddle::ckpt::AdapterConfig;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto config = AdapterConfig::from_json(heddle::json::parse(text), "adapter_config.json");
    const auto again = AdapterConfig::from_json(config.to_json(), "adapter_config.json");
    if (again.rank != config.rank || again.target_modules != config.target_modules) std::abort();
    for (const char* module :
         {"model.layers.0.self_attn.q_proj", "model.layers.11.mlp.experts.down_proj", "lm_head"}) {
      config.targets(module);
      if (config.rank_of(module) < 1 || !std::isfinite(config.scaling_of(module))) std::abort();
    }
  } catch (const heddle::UserError&) {
  }
  return 0;
}
