#include "models/qwen3_5/not_finite.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include <fmt/format.h>

#include "ops/autograd.h"

namespace heddle::models::qwen3_5 {
namespace {

bool is_finite(const at::Tensor& tensor) { return at::isfinite(tensor).all().item<bool>(); }

/// What is wrong with a part of the model of which the output is not finite.
std::string explain(const std::string& part, const std::vector<nn::Parameter*>& parameters) {
  const auto bad =
      std::find_if(parameters.begin(), parameters.end(),
                   [](const nn::Parameter* parameter) { return !is_finite(parameter->data()); });
  if (bad != parameters.end())
    return fmt::format("{}: {} holds NaN or infinity", part, (*bad)->name());
  return fmt::format("{}: its weights are finite, so it is an overflow; compute in a wider --dtype",
                     part);
}

}  // namespace

std::string find_not_finite(Model& model, const std::vector<std::int32_t>& tokens,
                            const std::vector<nn::Parameter*>& adapters) {
  const ops::NoGradient guard;
  const c10::Device device = model.context().device;
  const auto count = static_cast<std::int64_t>(tokens.size());
  const std::vector<std::int64_t> ids(tokens.begin(), tokens.end());
  const nn::BlockInputs inputs =
      model.block_inputs(ops::Sequences::from_host({0, static_cast<std::int32_t>(count)}, device),
                         at::arange(count, at::kLong).to(device), count, /*training=*/false);
  std::vector<nn::LayerCache> cache = model.make_cache(1, count);
  at::Tensor hidden = model.embed(at::tensor(ids, at::kLong).to(device));
  if (!is_finite(hidden)) return explain("the embedding", {&model.embedding_weight()});
  const auto& layers = model.layers();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    nn::CacheView view{&cache[i], {0}, {0}};
    hidden = layers[i]->generate(hidden, inputs, view);
    if (is_finite(hidden)) continue;
    std::vector<nn::Parameter*> own;
    layers[i]->visit_parameters([&](nn::Parameter& parameter) { own.push_back(&parameter); });
    const std::string part = fmt::format(".layers.{}.", i);
    std::copy_if(adapters.begin(), adapters.end(), std::back_inserter(own),
                 [&](const nn::Parameter* parameter) {
                   return ("." + parameter->name()).find(part) != std::string::npos;
                 });
    return explain(fmt::format("layer {}", i), own);
  }
  const at::Tensor normalized = model.final_norm(hidden);
  std::vector<nn::Parameter*> ends = model.parameters();
  std::erase_if(ends, [](const nn::Parameter* parameter) {
    return parameter->name().find("layers.") != std::string::npos;
  });
  return explain(is_finite(normalized) ? "the head" : "the final norm", ends);
}

}  // namespace heddle::models::qwen3_5
