#include "train/adapter_start.h"

#include <filesystem>
#include <string>
#include <vector>

#include "base/errors.h"
#include "ckpt/adapter_names.h"
#include "ckpt/hf_adapter.h"
#include "ckpt/trained_adapter.h"
#include "config/config.h"

namespace heddle::train {
namespace {

/// Sets what the user left out. Throws ConfigError for something else than the adapter has.
template <class Value>
void take(const config::RunConfig& config, const std::string& key, Value& setting,
          const Value& adapters) {
  if (config.is_set(key) && setting != adapters) {
    throw_error<ConfigError>(
        "{}: is {}, and the adapter in adapter.path, {}, has {}; leave it out to go on with that",
        config::where(config, key), setting, config.adapter.path, adapters);
  }
  setting = adapters;
}

void take_names(const config::RunConfig& config, const std::string& key,
                std::vector<std::string>& setting, const std::vector<std::string>& adapters) {
  if (!config.is_set(key)) setting = adapters;
}

/// A classifier's head has no place in a model of another head.
void require_head(const config::RunConfig& config, const ckpt::AdapterDirectory& adapter) {
  if (config.model.head == models::Head::kClassify || ckpt::label_rows(adapter) == 0) return;
  throw_error<ConfigError>(
      "{}: the adapter in adapter.path, {}, has a classifier's head, and this run's head is {}; "
      "give "
      "model.head=classify, or an adapter that was trained with another head",
      config::where(config, "model.head"), config.adapter.path,
      config::to_string(config.model.head));
}

/// The adapter was trained with its own tokens and template.
void take_tokenizer(config::RunConfig& config) {
  const std::filesystem::path folder = config.adapter.path;
  if (config.is_set("model.tokenizer") || !std::filesystem::exists(folder / "tokenizer.json"))
    return;
  config.model.tokenizer = folder.string();
}

/// Modules that were trained beside the adapter would be lost if they were not trained on.
void require_saved(const config::RunConfig& config, const ckpt::AdapterDirectory& adapter) {
  for (const ckpt::SavedParameter& saved : adapter.saved()) {
    // The head of a classifier is always trained, and a base layer is a copy of what is named.
    if (saved.name == "score.weight" || saved.is_base) continue;
    const std::string name = ckpt::to_spelling(saved.name, adapter.spelling());
    if (ckpt::is_saved_whole(config.adapter.modules_to_save, name)) continue;
    throw_error<ConfigError>(
        "{}: leaves out {}, which was trained with the adapter in adapter.path, {}; name it, or "
        "leave the setting out to go on with all",
        config::where(config, "adapter.modules_to_save"), saved.name, config.adapter.path);
  }
}

/// Pinned sequences go on under adapters of their own, and the modules beside them have one value.
void choose_update_mode(config::RunConfig& config) {
  constexpr const char* kKey = "rl.update_mode";
  if (config.adapter.modules_to_save.empty() || config.rl.update_mode != config::UpdateMode::kPin)
    return;
  if (config.is_set(kKey)) {
    throw_error<ConfigError>("{}: pin keeps adapters alone, and that in adapter.path, {}, has {}",
                             config::where(config, kKey), config.adapter.path,
                             config.adapter.modules_to_save.front());
  }
  config.rl.update_mode = config::RunConfig().rl.update_mode;
}

}  // namespace

void take_adapter_settings(config::RunConfig& config) {
  config::AdapterSection& section = config.adapter;
  if (section.path.empty()) return;
  const auto directory = ckpt::AdapterDirectory::open(section.path);
  require_head(config, directory);
  take_tokenizer(config);
  const ckpt::TrainedAdapter adapter = ckpt::trained_adapter(directory);
  take(config, "adapter.rank", section.rank, adapter.rank);
  take(config, "adapter.alpha", section.alpha, adapter.alpha);
  take(config, "adapter.rslora", section.rslora, adapter.rslora);
  if (adapter.has_shared_factors)
    take(config, "adapter.shared_expert_factors", section.shared_expert_factors, true);
  take_names(config, "adapter.targets", section.targets, adapter.targets);
  take_names(config, "adapter.target_parameters", section.target_parameters,
             adapter.target_parameters);
  take_names(config, "adapter.modules_to_save", section.modules_to_save, adapter.modules_to_save);
  require_saved(config, directory);
  if (section.shared_expert_factors && section.target_parameters.empty()) {
    throw_error<ConfigError>(
        "{}: is of adapters on experts, and that in adapter.path, {}, has none; leave it out",
        config::where(config, "adapter.shared_expert_factors"), section.path);
  }
  if (!section.target_parameters.empty() && section.dropout > 0) {
    throw_error<ConfigError>(
        "{}: adapters on experts have no dropout, and that in adapter.path, {}, is on experts; set "
        "it to 0",
        config::where(config, "adapter.dropout"), section.path);
  }
  choose_update_mode(config);
}

}  // namespace heddle::train
