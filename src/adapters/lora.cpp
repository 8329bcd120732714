#include "adapters/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/errors.h"
#include "base/rng.h"
#include "base/text.h"
#include "ops/autograd.h"

namespace heddle::adapters {

using ops::Tensors;

double LoraOptions::scaling() const {
  return rslora ? alpha / std::sqrt(static_cast<double>(rank)) : alpha / static_cast<double>(rank);
}

Lora::Lora(std::string module, std::int64_t in_features, std::int64_t out_features, double scaling,
           std::int64_t rank, double dropout, std::uint64_t seed)
    : module_(std::move(module)),
      a_(module_ + ".lora_A.weight", {rank, in_features}),
      b_(module_ + ".lora_B.weight", {out_features, rank}),
      scaling_(scaling),
      dropout_(dropout),
      seed_(seed) {}

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

at::Tensor Lora::forward(const at::Tensor& x, nn::Parameter& weight) {
  const bool drop = dropout_ > 0 && dropout_stream_ != 0;
  const at::Tensor input = ops::detached(x);
  const at::Tensor mask = drop ? dropout_mask(input) : at::Tensor();
  at::Tensor y, low;
  {
    const ops::NoGradient guard;
    y = at::mm(input, weight.value().t());
    low = at::mm(drop ? input * mask : input, a_.value().t());
    y.addmm_(low, b_.value().t(), 1, scaling_);
  }
  const bool want_input = x.requires_grad();
  return ops::with_gradient(
      "lora_linear", {x, weight.anchor(), a_.anchor(), b_.anchor()}, {y},
      [this, input, mask, low, want_input, &weight](const Tensors& grads) -> Tensors {
        const at::Tensor& dy = grads[0];
        if (!dy.defined()) return {{}, {}, {}, {}};
        const at::Tensor scaled = dy * scaling_;
        const at::Tensor d_low = at::mm(scaled, b_.value());
        if (b_.trainable()) nn::accumulate_product(b_, scaled, low);
        if (a_.trainable())
          nn::accumulate_product(a_, d_low, mask.defined() ? input * mask : input);
        if (weight.trainable()) nn::accumulate_product(weight, dy, input);
        if (!want_input) return {{}, {}, {}, {}};
        at::Tensor dx = at::mm(dy, weight.value());
        if (mask.defined()) {
          dx.add_(at::mm(d_low, a_.value()).mul_(mask));
        } else {
          dx.addmm_(d_low, a_.value());
        }
        return {dx, {}, {}, {}};
      })[0];
}

void Lora::visit_parameters(const std::function<void(nn::Parameter&)>& visit) {
  visit(a_);
  visit(b_);
}

void Lora::initialize() {
  const ops::NoGradient guard;
  const CounterRng rng(seed_, a_.name());
  at::Tensor host = at::empty(a_.global_shape(), at::kDouble);
  double* out = host.mutable_data_ptr<double>();
  const double bound = 1 / std::sqrt(static_cast<double>(a_.global_shape()[1]));
  for (std::int64_t i = 0; i < host.numel(); ++i) out[i] = (2 * rng.uniform(i) - 1) * bound;
  a_.data().copy_(host);
  b_.data().zero_();
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

bool matches(const std::string& target, const std::string& module, const LoraOptions& options) {
  if (target == "all-linear") {
    return in_all_linear(module) &&
           std::none_of(options.excluded.begin(), options.excluded.end(),
                        [&](const std::string& glob) { return text::matches_glob(glob, module); });
  }
  return module == target || module.ends_with("." + target) || text::matches_glob(target, module);
}

}  // namespace

LoraSet::LoraSet(const std::function<void(const std::function<void(nn::Linear&)>&)>& visit_linears,
                 const std::vector<std::string>& targets, const LoraOptions& options,
                 const runtime::Context& context)
    : options_(options) {
  std::vector<bool> used(targets.size());
  std::vector<std::string> known;
  visit_linears([&](nn::Linear& linear) {
    const std::string module = module_of(linear.weight().name());
    known.push_back(module.substr(module.rfind('.') + 1));
    bool wanted = false;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (matches(targets[i], module, options)) wanted = used[i] = true;
    }
    if (!wanted) return;
    if (module == "lm_head") {
      throw_error<ConfigError>(
          "adapter.targets: an adapter on lm_head is not built; train it whole with "
          "adapter.modules_to_save: [lm_head]");
    }
    add(linear, options.rank, options.scaling(), context);
  });
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (used[i]) continue;
    const std::string near = text::nearest(targets[i], known);
    throw_error<ConfigError>("adapter.targets: '{}' matches no linear layer of this model{}",
                             targets[i],
                             near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near));
  }
}

LoraSet::LoraSet(const std::function<void(const std::function<void(nn::Linear&)>&)>& visit_linears,
                 const std::vector<Module>& modules, const LoraOptions& options,
                 const runtime::Context& context)
    : options_(options) {
  std::map<std::string, const Module*> wanted;
  for (const Module& module : modules) wanted[module.name] = &module;
  visit_linears([&](nn::Linear& linear) {
    const auto it = wanted.find(module_of(linear.weight().name()));
    if (it == wanted.end()) return;
    add(linear, it->second->rank, it->second->scaling, context);
    wanted.erase(it);
  });
  if (wanted.empty()) return;
  std::vector<std::string> missing;
  for (const auto& [name, module] : wanted) missing.push_back(name);
  throw_error<ModelError>("the adapter has {} module(s) that this model does not: {}",
                          missing.size(), text::list_some(missing));
}

void LoraSet::add(nn::Linear& linear, std::int64_t rank, double scaling,
                  const runtime::Context& context) {
  auto lora =
      std::make_shared<Lora>(module_of(linear.weight().name()), linear.in_features(),
                             linear.out_features(), scaling, rank, options_.dropout, options_.seed);
  lora->visit_parameters(
      [&](nn::Parameter& parameter) { parameter.allocate(context.dtype, context.device); });
  linear.set_adapter(lora);
  adapters_.push_back(std::move(lora));
}

std::vector<std::string> LoraSet::modules() const {
  std::vector<std::string> names;
  for (const auto& lora : adapters_) names.push_back(lora->module());
  return names;
}

void LoraSet::visit_parameters(const std::function<void(nn::Parameter&)>& visit) {
  for (const auto& lora : adapters_) lora->visit_parameters(visit);
}

void LoraSet::set_dropout_stream(std::uint64_t stream) {
  for (const auto& lora : adapters_) lora->set_dropout_stream(stream);
}

}  // namespace heddle::adapters
