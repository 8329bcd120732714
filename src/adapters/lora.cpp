#include "adapters/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <utility>

#include "adapters/initialize.h"
#include "base/errors.h"
#include "base/rng.h"
#include "base/text.h"
#include "ops/autograd.h"

namespace heddle::adapters {

using ops::Tensors;

double LoraOptions::scaling() const {
  return rslora ? alpha / std::sqrt(static_cast<double>(rank)) : alpha / static_cast<double>(rank);
}

namespace {

/// The part of the weight's placement that divides one of its dimensions.
nn::Placement along(const nn::Placement& weight, std::int64_t tensor_dim) {
  nn::Placement placement;
  std::copy_if(weight.begin(), weight.end(), std::back_inserter(placement),
               [&](const nn::Shard& shard) { return shard.tensor_dim == tensor_dim; });
  return placement;
}

}  // namespace

Lora::Lora(std::string module, std::int64_t in_features, std::int64_t out_features, double scaling,
           std::int64_t rank, double dropout, std::uint64_t seed,
           const nn::Placement& weight_placement)
    : module_(std::move(module)),
      a_(module_ + ".lora_A.weight", {rank, in_features}, along(weight_placement, 1)),
      b_(module_ + ".lora_B.weight", {out_features, rank}, along(weight_placement, 0)),
      scaling_(scaling),
      dropout_(dropout),
      seed_(seed) {
  // Where the weight is divided, the other factor is whole and sees the work of one rank.
  if (!a_.placement().empty()) b_.set_partial_gradient();
  if (!b_.placement().empty()) a_.set_partial_gradient();
}

at::Tensor Lora::dropout_mask(const at::Tensor& x) const {
  const CounterRng rng(seed_, fmt::format("{}/dropout/{}", module_, dropout_stream_));
  at::Tensor mask = at::empty(x.sizes(), at::kFloat);
  float* out = mask.mutable_data_ptr<float>();
  const auto kept = static_cast<float>(1 / (1 - dropout_));
  // Four words per counter; the threshold is exact to 2^-32.
  const auto threshold = static_cast<std::uint64_t>(dropout_ * 0x1p32);
  for (std::int64_t i = 0; i < mask.numel(); i += 4) {
    const auto words = rng.words(static_cast<std::uint64_t>(i / 4));
    for (std::int64_t j = 0; j < 4 && i + j < mask.numel(); ++j)
      out[i + j] = words[j] < threshold ? 0 : kept;
  }
  return mask.to(x.options());
}

namespace {

/// A layer with its adapter, in a pass without dropout.
struct Adapted {
  Lora* lora;
  nn::Parameter* weight;
};

at::Tensor stacked_a(const std::vector<Adapted>& adapted) {
  Tensors rows;
  for (const Adapted& one : adapted) rows.push_back(one.lora->a().data());
  return rows.size() == 1 ? rows[0] : at::cat(rows);
}

/// The columns of `low` [T, sum of ranks] that belong to each adapter.
Tensors split(const at::Tensor& low, const std::vector<Adapted>& adapted) {
  Tensors parts;
  std::int64_t first = 0;
  for (const Adapted& one : adapted) {
    parts.push_back(low.narrow(1, first, one.lora->rank()));
    first += one.lora->rank();
  }
  return parts;
}

/// Gradients of the adapters, and of the input [T,in] if it is wanted.
at::Tensor backward(const std::vector<Adapted>& adapted, const Tensors& grads,
                    const at::Tensor& low, const std::function<at::Tensor()>& input,
                    bool want_input) {
  const Tensors lows = split(low, adapted);
  Tensors d_lows;
  at::Tensor dx;
  for (std::size_t i = 0; i < adapted.size(); ++i) {
    const auto& [lora, weight] = adapted[i];
    const at::Tensor& dy = grads[i];
    if (!dy.defined()) {
      d_lows.push_back(at::zeros_like(lows[i]));
      continue;
    }
    // The scale sits on the side of the rank, which is narrow.
    d_lows.push_back(at::mm(dy, lora->b().value()).mul_(lora->scaling()));
    if (lora->b().trainable()) nn::accumulate_product(lora->b(), dy, lows[i]);
    if (weight->trainable()) nn::accumulate_product(*weight, dy, input());
    if (!want_input) continue;
    if (dx.defined()) {
      dx.addmm_(dy, weight->data());
    } else {
      dx = at::mm(dy, weight->data());
    }
  }
  const at::Tensor d_low = d_lows.size() == 1 ? d_lows[0] : at::cat(d_lows, 1);
  if (dx.defined()) dx.addmm_(d_low, stacked_a(adapted));
  const bool trains_a = std::any_of(adapted.begin(), adapted.end(),
                                    [](const Adapted& one) { return one.lora->a().trainable(); });
  if (!trains_a) return dx;
  // One read of the input for all of them.
  const at::Tensor d_a = at::mm(d_low.t(), input());
  std::int64_t first = 0;
  for (const Adapted& one : adapted) {
    if (one.lora->a().trainable())
      one.lora->a().add_gradient(d_a.narrow(0, first, one.lora->rank()));
    first += one.lora->rank();
  }
  return dx;
}

Tensors forward_together(const nn::LinearInput& given, const std::vector<Adapted>& adapted) {
  const at::Tensor& x = given.value;
  Tensors outputs, inputs = {x};
  at::Tensor low;
  {
    const ops::NoGradient guard;
    const at::Tensor input = ops::detached(x);
    low = at::mm(input, stacked_a(adapted).t());
    const Tensors lows = split(low, adapted);
    for (std::size_t i = 0; i < adapted.size(); ++i) {
      const auto& [lora, weight] = adapted[i];
      outputs.push_back(at::mm(input, weight->data().t()));
      at::Tensor scaled = lows[i];
      scaled.mul_(lora->scaling());
      outputs.back().addmm_(scaled, lora->b().data().t());
    }
  }
  for (const Adapted& one : adapted) {
    inputs.push_back(one.weight->anchor());
    inputs.push_back(one.lora->a().anchor());
    inputs.push_back(one.lora->b().anchor());
  }
  const auto input = given.again ? given.again : [saved = ops::detached(x)] { return saved; };
  const bool want_input = x.requires_grad();
  return ops::with_gradient(
      "lora_linear", inputs, outputs,
      [adapted, input, low, want_input, count = inputs.size()](const Tensors& grads) -> Tensors {
        Tensors result(count);
        result[0] = backward(adapted, grads, low, input, want_input);
        return result;
      });
}

}  // namespace

std::vector<at::Tensor> Lora::forward(const nn::LinearInput& x,
                                      const std::vector<nn::Linear*>& layers) {
  std::vector<Adapted> adapted;
  for (nn::Linear* layer : layers) {
    auto* lora = dynamic_cast<Lora*>(layer->adapter());
    if (lora != nullptr && !lora->drops()) adapted.push_back({lora, &layer->weight()});
  }
  if (adapted.size() == layers.size()) return forward_together(x, adapted);
  if (layers.size() == 1) return {forward_with_dropout(x.value, layers[0]->weight())};
  std::vector<at::Tensor> outputs;
  for (nn::Linear* layer : layers) outputs.push_back(layer->forward(x));
  return outputs;
}

at::Tensor Lora::forward_with_dropout(const at::Tensor& x, nn::Parameter& weight) {
  const at::Tensor input = ops::detached(x), mask = dropout_mask(input);
  at::Tensor y, low;
  {
    const ops::NoGradient guard;
    y = at::mm(input, weight.value().t());
    low = at::mm(input * mask, a_.value().t()).mul_(scaling_);
    y.addmm_(low, b_.value().t());
  }
  const bool want_input = x.requires_grad();
  return ops::with_gradient(
      "lora_linear", {x, weight.anchor(), a_.anchor(), b_.anchor()}, {y},
      [this, input, mask, low, want_input, &weight](const Tensors& grads) -> Tensors {
        const at::Tensor& dy = grads[0];
        if (!dy.defined()) return {{}, {}, {}, {}};
        const at::Tensor d_low = at::mm(dy, b_.value()).mul_(scaling_);
        if (b_.trainable()) nn::accumulate_product(b_, dy, low);
        if (a_.trainable()) nn::accumulate_product(a_, d_low, input * mask);
        if (weight.trainable()) nn::accumulate_product(weight, dy, input);
        if (!want_input) return {{}, {}, {}, {}};
        at::Tensor dx = at::mm(dy, weight.value());
        dx.add_(at::mm(d_low, a_.value()).mul_(mask));
        return {dx, {}, {}, {}};
      })[0];
}

void Lora::visit_parameters(const std::function<void(nn::Parameter&)>& visit) {
  visit(a_);
  visit(b_);
}

void Lora::initialize() {
  fill_kaiming(a_, seed_);
  b_.owned().zero_();
}

at::Tensor Lora::delta() const {
  const ops::NoGradient guard;
  const auto wide = a_.value().scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::mm(b_.value().to(wide), a_.value().to(wide)) * scaling_;
}

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

void LoraSet::set_dropout_stream(std::uint64_t stream) {
  for (const auto& lora : adapters_) lora->set_dropout_stream(stream);
}

}  // namespace heddle::adapters
