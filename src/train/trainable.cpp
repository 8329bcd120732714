#include "train/trainable.h"

#include <algorithm>
#include <set>

#include "base/errors.h"
#include "base/text.h"

namespace heddle::train {
namespace {

using models::Head;

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return text::matches_glob(pattern, name); });
}

/// modules_to_save names a module ("lm_head", "embed_tokens") or a dotted suffix of one.
bool is_saved_whole(const std::vector<std::string>& modules, const std::string& parameter) {
  const std::string module = adapters::module_of(parameter);
  return std::any_of(modules.begin(), modules.end(), [&](const std::string& wanted) {
    return module == wanted || module.ends_with("." + wanted);
  });
}

/// `unmatched`: of adapter.modules_to_save; `modules`: what the model has.
[[noreturn]] void refuse_saved_module(const std::string& unmatched, const models::Model& model,
                                      const std::vector<std::string>& modules) {
  if (unmatched == "lm_head" && model.tied() && model.head() == Head::kLanguageModel) {
    throw ConfigError(
        "adapter.modules_to_save: 'lm_head' is no module of its own here, as this model's head is "
        "tied to its embedding; write embed_tokens, which trains and saves both");
  }
  const std::string near = text::nearest(unmatched, modules);
  throw_error<ConfigError>("adapter.modules_to_save: '{}' matches no module of this model{}",
                           unmatched,
                           near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near));
}

[[noreturn]] void refuse_adapted_module(const std::vector<std::string>& wanted,
                                        const std::string& parameter) {
  const auto matches = [&](const std::string& module) {
    return is_saved_whole({module}, parameter);
  };
  throw_error<ConfigError>(
      "adapter.modules_to_save: '{}' names {}, which has an adapter; leave one of them out of "
      "adapter.targets or of this list",
      *std::find_if(wanted.begin(), wanted.end(), matches), adapters::module_of(parameter));
}

}  // namespace

void choose_trainable(const config::RunConfig& config, Setup& setup) {
  const bool lora = config.train.method == config::Method::kLora;
  std::vector<std::string> unmatched = config.train.freeze, modules, unmatched_modules;
  if (lora) unmatched_modules = config.adapter.modules_to_save;
  bool is_any_trained = setup.adapters != nullptr;
  std::set<std::string> adapted;
  if (setup.adapters) {
    const std::vector<std::string> names = setup.adapters->modules();
    adapted.insert(names.begin(), names.end());
  }
  for (nn::Parameter* parameter : setup.model->parameters()) {
    const bool whole = lora && is_saved_whole(config.adapter.modules_to_save, parameter->name());
    if (whole && adapted.contains(adapters::module_of(parameter->name())))
      refuse_adapted_module(config.adapter.modules_to_save, parameter->name());
    // A classification head that starts from random numbers is always trained.
    const bool head = lora && parameter->name() == "score.weight";
    const bool trainable =
        (!lora || whole || head) && !matches_any(config.train.freeze, parameter->name());
    std::erase_if(unmatched,
                  [&](const std::string& p) { return text::matches_glob(p, parameter->name()); });
    std::erase_if(unmatched_modules, [&](const std::string& module) {
      return is_saved_whole({module}, parameter->name());
    });
    const std::string module = adapters::module_of(parameter->name());
    modules.push_back(module.substr(module.rfind('.') + 1));
    parameter->set_trainable(trainable);
    is_any_trained = is_any_trained || trainable;
    if (trainable && parameter->is_held()) setup.trainable.push_back(parameter);
    if (trainable && lora) setup.saved_whole.push_back(parameter);
  }
  if (setup.adapters) {
    setup.adapters->visit_parameters([&](nn::Parameter& parameter) {
      if (parameter.is_held()) setup.trainable.push_back(&parameter);
    });
  }
  if (!unmatched.empty()) {
    throw_error<ConfigError>("train.freeze: '{}' matches no parameter of this model",
                             unmatched.front());
  }
  if (!unmatched_modules.empty())
    refuse_saved_module(unmatched_modules.front(), *setup.model, modules);
  if (!is_any_trained) throw ConfigError("nothing to train: train.freeze matches every parameter");
}

}  // namespace heddle::train
