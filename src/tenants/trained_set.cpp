#include "tenants/trained_set.h"

#include <ATen/ops/_foreach_copy.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/text.h"
#include "ckpt/hf_adapter.h"
#include "device/device.h"
#include "ops/autograd.h"

namespace heddle::tenants {
namespace {

using adapters::LoraSet;

bool contains(const std::string& name, const char* part) {
  return name.find(part) != std::string::npos;
}

bool is_wanted(const SetOptions& options, const std::string& module) {
  if (contains(module, ".self_attn.") || contains(module, ".linear_attn.")) return options.attn;
  if (module == "lm_head") return options.unembed;
  const bool routes = module.ends_with(".mlp.gate") || module.ends_with("shared_expert_gate");
  return contains(module, ".mlp.") && !routes && options.mlp;
}

std::vector<LoraSet::Module> modules_of(assembly::Model& model, const SetOptions& options,
                                        double scaling) {
  std::vector<LoraSet::Module> modules;
  const auto add = [&](const std::string& name) {
    if (is_wanted(options, name)) modules.push_back({name, options.rank, scaling});
  };
  model.visit_linears([&](nn::Linear& linear) { add(linear.module()); });
  model.visit_expert_weights([&](nn::ExpertWeights& weights) { add(weights.weight().name()); });
  return modules;
}

}  // namespace

std::unique_ptr<train::Optimizer> make_optimizer(assembly::ModelOnRanks& base,
                                                 const LoraSet& factors, std::uint64_t seed) {
  std::vector<nn::Parameter*> parameters;
  factors.visit_parameters([&](nn::Parameter& factor) {
    if (factor.is_held()) parameters.push_back(&factor);
  });
  return std::make_unique<train::Optimizer>(std::move(parameters), config::OptimSection{}, seed,
                                            train::Optimizer::Ranks::of(base.context.mesh));
}

void require_room(const LoraSet& factors, std::int64_t free_bytes) {
  std::int64_t numbers = 0, of_experts = 0, bytes = 0;
  factors.visit_parameters([&](const nn::Parameter& factor) {
    const at::Tensor own = factor.owned();
    numbers += own.numel();
    if (own.dim() == 3) of_experts += own.numel();
    const bool has_master = own.element_size() < 4;
    bytes += own.numel() * static_cast<std::int64_t>(sizeof(float)) * (has_master ? 4 : 3);
  });
  if (bytes <= free_bytes) return;
  throw_error<ConfigError>(
      "adapters of rank {} have {:.1f} million weights here{}: their gradients and optimizer take "
      "{}, and {} of memory are free; expected a lower rank, fewer of train_attn, train_mlp and "
      "train_unembed, or the end of another run",
      factors.options().rank, static_cast<double>(numbers) / 1e6,
      of_experts > 0
          ? fmt::format(", {:.0f} % of them on routed experts",
                        100 * static_cast<double>(of_experts) / static_cast<double>(numbers))
          : "",
      text::format_bytes(static_cast<double>(bytes)),
      text::format_bytes(static_cast<double>(std::max<std::int64_t>(0, free_bytes))));
}

TrainedSet make_trained_set(assembly::ModelOnRanks& base, const SetOptions& options) {
  if (options.rank < 1 || options.rank > 512)
    throw_error<ConfigError>("rank {}: expected a number from 1 to 512", options.rank);
  if (!(options.alpha > 0) || !std::isfinite(options.alpha))
    throw_error<ConfigError>("alpha {}: expected a number above 0", options.alpha);
  adapters::LoraOptions lora;
  lora.rank = options.rank;
  lora.alpha = options.alpha;
  lora.seed = options.seed;
  if (options.shared_expert_factors) lora.expert_factors = nn::ExpertFactors::kSharedOuter;
  TrainedSet set{.options = options, .factors = {}, .optimizer = {}};
  const std::vector<LoraSet::Module> modules = modules_of(*base.model, options, lora.scaling());
  if (modules.empty())
    throw ConfigError("nothing to train: expected one of train_attn, train_mlp, train_unembed");
  set.factors =
      std::make_unique<LoraSet>(ckpt::adaptable(*base.model), modules, lora, base.context);
  require_room(*set.factors, device::free_bytes(base.context.device));
  set.factors->initialize();
  set.optimizer = make_optimizer(base, *set.factors, options.seed);
  return set;
}

std::vector<StepResult> step(assembly::ModelOnRanks& base, std::span<const SetStep> steps) {
  std::vector<const train::Optimizer*> optimizers;
  std::vector<train::Optimizer::Update> updates;
  for (const SetStep& set : steps) {
    optimizers.push_back(set.optimizer);
    updates.push_back({set.optimizer, set.lr});
  }
  std::vector<StepResult> results;
  const auto norms = train::Optimizer::queued_gradient_norms(optimizers);
  train::Optimizer::step_together(base.model->kernels(), updates, [&] {
    const std::vector<double> found = norms();
    std::vector<double> multipliers;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const double clip = steps[i].clip_norm;
      results.push_back({found[i], std::isfinite(found[i]) && std::isfinite(steps[i].loss)});
      multipliers.push_back(!results[i].updated ? std::numeric_limits<double>::quiet_NaN()
                            : clip > 0          ? std::min(1.0, clip / (found[i] + 1e-6))
                                                : 1);
    }
    return multipliers;
  });
  return results;
}

std::unique_ptr<LoraSet> copy_of(assembly::ModelOnRanks& base, const LoraSet& factors) {
  const ops::NoGradient guard;
  std::vector<LoraSet::Module> modules;
  for (const auto& lora : factors.adapters())
    modules.push_back({lora->module(), lora->rank(), lora->scaling()});
  for (const auto& lora : factors.expert_adapters())
    modules.push_back({lora->parameter(), lora->rank(), lora->scaling()});
  auto copy = std::make_unique<LoraSet>(ckpt::adaptable(*base.model), modules, factors.options(),
                                        base.context);
  std::vector<at::Tensor> values, places;
  factors.visit_parameters([&](nn::Parameter& factor) { values.push_back(factor.owned()); });
  copy->visit_parameters([&](nn::Parameter& factor) {
    factor.set_trainable(false);
    places.push_back(factor.owned());
  });
  at::_foreach_copy_(places, values);
  return copy;
}

}  // namespace heddle::tenants
