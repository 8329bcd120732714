// Which layers of a model have adapters.
#include <algorithm>
#include <map>
#include <utility>

#include "adapters/lora.h"
#include "base/errors.h"
#include "base/text.h"

namespace heddle::adapters {

std::string module_of(const std::string& parameter) {
  return parameter.ends_with(".weight") ? parameter.substr(0, parameter.size() - 7) : parameter;
}

namespace {

bool in_all_linear(const std::string& module) {
  return module != "lm_head" && module != "score" && !module.ends_with(".mlp.gate");
}

/// A name, a dotted suffix of it, or a glob over the whole of it.
bool matches_name(const std::string& target, const std::string& name) {
  return name == target || name.ends_with("." + target) || text::matches_glob(target, name);
}

bool matches(const std::string& target, const std::string& module, const LoraOptions& options) {
  if (target == "all-linear") {
    return in_all_linear(module) &&
           std::none_of(options.excluded.begin(), options.excluded.end(),
                        [&](const std::string& glob) { return text::matches_glob(glob, module); });
  }
  return matches_name(target, module);
}

}  // namespace

LoraSet::LoraSet(const Adaptable& model, const std::vector<std::string>& targets,
                 const std::vector<std::string>& target_parameters, const LoraOptions& options,
                 const runtime::Context& context)
    : options_(options) {
  choose_linears(model, targets, context);
  choose_experts(model, target_parameters, context);
}

void LoraSet::choose_linears(const Adaptable& model, const std::vector<std::string>& targets,
                             const runtime::Context& context) {
  std::vector<bool> used(targets.size());
  std::vector<std::string> known;
  model.visit_linears([&](nn::Linear& linear) {
    const std::string module = module_of(linear.weight().name());
    known.push_back(module.substr(module.rfind('.') + 1));
    bool wanted = false;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (matches(targets[i], module, options_)) wanted = used[i] = true;
    }
    if (!wanted) return;
    if (module == "lm_head") {
      throw_error<ConfigError>(
          "adapter.targets: an adapter on lm_head is not built; train it whole with "
          "adapter.modules_to_save: [lm_head]");
    }
    add(linear, options_.rank, options_.scaling(), context);
  });
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (used[i]) continue;
    const std::string near = text::nearest(targets[i], known);
    throw_error<ConfigError>("adapter.targets: '{}' matches no linear layer of this model{}",
                             targets[i],
                             near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near));
  }
}

void LoraSet::choose_experts(const Adaptable& model, const std::vector<std::string>& targets,
                             const runtime::Context& context) {
  if (targets.empty()) return;
  std::vector<bool> used(targets.size());
  bool has_experts = false;
  model.visit_expert_weights([&](nn::ExpertWeights& weights) {
    has_experts = true;
    bool wanted = false;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (matches_name(targets[i], weights.weight().name())) wanted = used[i] = true;
    }
    if (wanted) add(weights, options_.rank, options_.scaling(), context);
  });
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (used[i]) continue;
    throw_error<ConfigError>(
        "adapter.target_parameters: '{}' matches no parameter; {}", targets[i],
        has_experts ? "this model's experts have experts.gate_up_proj and experts.down_proj"
                    : "this model has no routed experts, name linear layers in adapter.targets");
  }
}

LoraSet::LoraSet(const Adaptable& model, const std::vector<Module>& modules,
                 const LoraOptions& options, const runtime::Context& context)
    : options_(options) {
  std::map<std::string, const Module*> wanted;
  for (const Module& module : modules) wanted[module.name] = &module;
  const auto put_on = [&](const std::string& name, auto& layer) {
    const auto it = wanted.find(name);
    if (it == wanted.end()) return;
    add(layer, it->second->rank, it->second->scaling, context);
    wanted.erase(it);
  };
  model.visit_linears(
      [&](nn::Linear& linear) { put_on(module_of(linear.weight().name()), linear); });
  model.visit_expert_weights(
      [&](nn::ExpertWeights& weights) { put_on(weights.weight().name(), weights); });
  if (wanted.empty()) return;
  std::vector<std::string> missing;
  for (const auto& [name, module] : wanted) missing.push_back(name);
  throw_error<ModelError>("the adapter has {} module(s) that this model does not: {}",
                          missing.size(), text::list_some(missing));
}

void LoraSet::add(nn::Linear& linear, std::int64_t rank, double scaling,
                  const runtime::Context& context) {
  auto lora = std::make_shared<Lora>(module_of(linear.weight().name()), linear.in_features(),
                                     linear.out_features(), scaling, rank, options_.dropout,
                                     options_.seed, linear.weight().placement());
  lora->visit_parameters([&](nn::Parameter& parameter) {
    if (linear.weight().has_partial_gradient()) parameter.set_partial_gradient();
    parameter.place(context.mesh);
    parameter.allocate(context.dtype, context.device);
  });
  linear.set_adapter(lora);
  adapters_.push_back(std::move(lora));
}

void LoraSet::add(nn::ExpertWeights& weights, std::int64_t rank, double scaling,
                  const runtime::Context& context) {
  auto lora =
      std::make_shared<ExpertLora>(weights.weight().name(), weights, scaling, rank, options_.seed);
  lora->visit_parameters([&](nn::Parameter& parameter) {
    parameter.place(context.mesh);
    parameter.allocate(context.dtype, context.device);
  });
  weights.set_adapter(lora);
  experts_.push_back(std::move(lora));
}

void LoraSet::initialize() {
  for (const auto& lora : adapters_) lora->initialize();
  for (const auto& lora : experts_) lora->initialize();
}

std::vector<std::string> LoraSet::modules() const {
  std::vector<std::string> names;
  for (const auto& lora : adapters_) names.push_back(lora->module());
  return names;
}

void LoraSet::visit_parameters(const std::function<void(nn::Parameter&)>& visit) {
  for (const auto& lora : adapters_) lora->visit_parameters(visit);
  for (const auto& lora : experts_) lora->visit_parameters(visit);
}

void LoraSet::set_dropout(const Dropout& dropout) {
  for (const auto& lora : adapters_) lora->set_dropout(dropout);
}

}  // namespace heddle::adapters
