// Choice of the layers that have adapters.
#include <algorithm>
#include <map>
#include <utility>

#include "adapters/lora.h"
#include "base/errors.h"
#include "base/text.h"

namespace heddle::adapters {

namespace {

/// Heads stand outside of the passes that adapters belong to.
bool is_head(const std::string& module) { return module == "lm_head" || module == "score"; }

bool in_all_linear(const std::string& module) {
  return !is_head(module) && !module.ends_with(".mlp.gate");
}

/// all-linear without the gates of single rows, which SGLang's servers refuse (its table of LoRA
/// modules has in_proj_qkvz and out_proj of a linear attention layer, not in_proj_ba).
bool is_servable(const std::string& module) {
  return !module.ends_with(".in_proj_b") && !module.ends_with(".in_proj_a") &&
         !module.ends_with(".in_proj_ba") && !module.ends_with(".shared_expert_gate");
}

/// A name, a dotted suffix of it, or a glob over the whole of it.
bool matches_name(const std::string& target, const std::string& name) {
  return name == target || name.ends_with("." + target) || text::matches_glob(target, name);
}

bool matches(const std::string& target, const std::string& module, const LoraOptions& options) {
  if (target == "all-linear" || target == "servable") {
    return in_all_linear(module) && (target == "all-linear" || is_servable(module)) &&
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
    const std::string& module = linear.module();
    known.push_back(module.substr(module.rfind('.') + 1));
    bool wanted = false;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (matches(targets[i], module, options_)) wanted = used[i] = true;
    }
    if (!wanted) return;
    if (is_head(module)) {
      throw_error<ConfigError>(
          "adapter.targets: an adapter on {} is not built; train it whole with "
          "adapter.modules_to_save: [{}]",
          module, linear.owns_weight() ? module : "embed_tokens");
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
  const auto add_wanted = [&](const std::string& name, auto& layer) {
    const auto it = wanted.find(name);
    if (it == wanted.end() || name == "score") return;
    add(layer, it->second->rank, it->second->scaling, context);
    wanted.erase(it);
  };
  model.visit_linears([&](nn::Linear& linear) { add_wanted(linear.module(), linear); });
  model.visit_expert_weights(
      [&](nn::ExpertWeights& weights) { add_wanted(weights.weight().name(), weights); });
  if (wanted.empty()) return;
  std::vector<std::string> missing;
  for (const auto& [name, module] : wanted) missing.push_back(name);
  throw_error<ModelError>(
      "the adapter has {} module(s) that this model does not have, or that carry none: {}",
      missing.size(), text::list_some(missing));
}

namespace {

/// Storage for the factors of one layer.
template <class Adapter>
void allocate(Adapter& adapter, bool has_partial_gradient, const runtime::Context& context) {
  for (nn::Parameter* factor : {&adapter.a(), &adapter.b()}) {
    if (has_partial_gradient) factor->set_partial_gradient();
    factor->place(context.mesh);
    factor->allocate(context.dtype, context.device);
  }
}

}  // namespace

void LoraSet::add(nn::Linear& linear, std::int64_t rank, double scaling,
                  const runtime::Context& context) {
  auto lora =
      std::make_unique<Lora>(linear.module(), linear.in_features(), linear.out_features(), scaling,
                             rank, options_.dropout, options_.seed, linear.weight().placement());
  allocate(*lora, linear.weight().has_partial_gradient(), context);
  put_on(linear, *lora);
  adapters_.push_back(std::move(lora));
}

void LoraSet::add(nn::ExpertWeights& weights, std::int64_t rank, double scaling,
                  const runtime::Context& context) {
  auto lora = std::make_unique<ExpertLora>(weights.weight().name(), weights, scaling, rank,
                                           options_.seed, options_.expert_factors);
  allocate(*lora, /*has_partial_gradient=*/false, context);
  put_on(weights, *lora);
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

void LoraSet::visit_parameters(const std::function<void(nn::Parameter&)>& visit) const {
  const auto visit_both = [&](auto& adapter) {
    visit(adapter.a());
    visit(adapter.b());
  };
  for (const auto& lora : adapters_) visit_both(*lora);
  for (const auto& lora : experts_) visit_both(*lora);
}

}  // namespace heddle::adapters
