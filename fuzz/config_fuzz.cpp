// config.json of every family: refused with a ModelError or the sizes of layers whose products are
// positive and can be multiplied.
#include <cstdlib>
#include <string_view>

#include "base/errors.h"
#include "base/json.h"
#include "models/registry.h"

namespace {

using heddle::models::Config;

void check(const Config& config) {
  if (config.hidden_size < 1 || config.vocab_size < 1 || config.layers.empty()) std::abort();
  // Layers of a kind are alike: the first and the last are enough.
  for (const auto* layer : {&config.layers.front(), &config.layers.back()}) {
    for (const heddle::models::Product& product : layer->products())
      if (product.in < 1 || product.out < 1 || product.per_token < 1) std::abort();
    if (layer->active_width() < 1 || layer->mixer_heads().second < 1) std::abort();
    if (layer->matmul_weights() < 1) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  heddle::models::Json json;
  try {
    json = heddle::json::parse(text);
  } catch (const heddle::DataError&) {
    return 0;
  }
  // As it is, and as the configuration of each family.
  for (const char* type : {"", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
                           "qwen3_5_moe_text", "qwen3_next"}) {
    if (*type != '\0') {
      if (!json.is_object()) return 0;
      json["model_type"] = type;
      if (!json.contains("text_config")) json["text_config"] = json;
    }
    try {
      check(heddle::models::parse_config(json, "config.json"));
    } catch (const heddle::ModelError&) {
    }
  }
  return 0;
}
