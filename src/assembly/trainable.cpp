#include "assembly/trainable.h"

#include <algorithm>
#include <set>

#include "base/errors.h"
#include "base/text.h"
#include "ckpt/adapter_names.h"

namespace heddle::assembly {
namespace {

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return text::matches_glob(pattern, name); });
}

/// `unmatched`: of adapter.modules_to_save; `modules`: what the model has.
[[noreturn]] void refuse_saved_module(const std::string& unmatched, Model& model,
                                      const std::vector<std::string>& modules) {
  if (unmatched == "lm_head" && model.tied() && model.head() == Head::kLanguageModel) {
    throw ConfigError(
        "adapter.modules_to_save: 'lm_head' is no module of its own here, as this model's head is "
        "tied to its embedding; write embed_tokens, which trains and saves both");
  }
  for (nn::Parameter* parameter : model.parameters()) {
    const std::string& name = parameter->name();
    const std::size_t dot = name.rfind('.');
    if (dot == std::string::npos || name.substr(dot + 1) != unmatched) continue;
    const std::string module = name.substr(0, dot);
    throw_error<ConfigError>(
        "adapter.modules_to_save: '{}' is a parameter of {}, and PEFT saves whole modules; write "
        "{}",
        unmatched, module, module.substr(module.rfind('.') + 1));
  }
  const std::string near = text::nearest(unmatched, modules);
  throw_error<ConfigError>("adapter.modules_to_save: '{}' matches no module of this model{}",
                           unmatched,
                           near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near));
}

[[noreturn]] void refuse_adapted_module(const std::vector<std::string>& wanted,
                                        const std::string& parameter) {
  const auto matches = [&](const std::string& module) {
    return ckpt::is_saved_whole({module}, parameter);
  };
  throw_error<ConfigError>(
      "adapter.modules_to_save: '{}' names {}, which has an adapter; leave one of them out of "
      "adapter.targets or of this list",
      *std::find_if(wanted.begin(), wanted.end(), matches), nn::module_of(parameter));
}

void freeze_everything(ModelOnRanks& placed) {
  const auto freeze = [](nn::Parameter& parameter) { parameter.set_trainable(false); };
  placed.model->visit_parameters(freeze);
  if (placed.adapters) placed.adapters->visit_parameters(freeze);
}

}  // namespace

void choose_trainable(const ModelRecipe& recipe, ModelOnRanks& placed) {
  if (recipe.purpose != Purpose::kTrain) return freeze_everything(placed);
  const bool lora = placed.adapters != nullptr;
  std::vector<std::string> unmatched = recipe.freeze, modules,
                           unmatched_modules = recipe.saved_whole;
  bool is_any_trained = lora;
  std::set<std::string> adapted;
  if (lora) {
    const std::vector<std::string> names = placed.adapters->modules();
    adapted.insert(names.begin(), names.end());
  }
  for (nn::Parameter* parameter : placed.model->parameters()) {
    const bool whole = ckpt::is_saved_whole(recipe.saved_whole, parameter->name());
    if (whole && adapted.contains(nn::module_of(parameter->name())))
      refuse_adapted_module(recipe.saved_whole, parameter->name());
    // A classification head that starts from random numbers is always trained.
    const bool head = lora && parameter->name() == "score.weight";
    const bool trainable =
        (!lora || whole || head) && !matches_any(recipe.freeze, parameter->name());
    std::erase_if(unmatched,
                  [&](const std::string& p) { return text::matches_glob(p, parameter->name()); });
    std::erase_if(unmatched_modules, [&](const std::string& module) {
      return ckpt::is_saved_whole({module}, parameter->name());
    });
    const std::string module = nn::module_of(parameter->name());
    modules.push_back(module.substr(module.rfind('.') + 1));
    parameter->set_trainable(trainable);
    is_any_trained = is_any_trained || trainable;
    if (trainable && parameter->is_held()) placed.trainable.push_back(parameter);
    if (trainable && lora) placed.saved_whole.push_back(parameter);
  }
  if (lora) {
    placed.adapters->visit_parameters([&](nn::Parameter& parameter) {
      if (parameter.is_held()) placed.trainable.push_back(&parameter);
    });
  }
  if (!unmatched.empty()) {
    throw_error<ConfigError>("train.freeze: '{}' matches no parameter of this model",
                             unmatched.front());
  }
  // PEFT's configurations name both tables of a tied model, which are one here.
  if (placed.model->tied() &&
      ckpt::is_saved_whole(recipe.saved_whole, placed.model->embedding_weight().name()))
    std::erase(unmatched_modules, "lm_head");
  if (!unmatched_modules.empty())
    refuse_saved_module(unmatched_modules.front(), *placed.model, modules);
  if (!is_any_trained) throw ConfigError("nothing to train: train.freeze matches every parameter");
}

}  // namespace heddle::assembly
