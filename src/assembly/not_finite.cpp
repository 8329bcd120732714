#include "assembly/not_finite.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <iterator>

#include <fmt/format.h>

#include "ops/autograd.h"

namespace heddle::assembly {
namespace {

bool is_finite(const at::Tensor& tensor) { return at::isfinite(tensor).all().item<bool>(); }

/// Describes the fault in a part of the model whose output is not finite.
std::string explain(const std::string& part, const std::vector<nn::Parameter*>& parameters) {
  const auto bad =
      std::find_if(parameters.begin(), parameters.end(), [](const nn::Parameter* parameter) {
        return parameter->is_held() && !is_finite(parameter->data());
      });
  if (bad != parameters.end())
    return fmt::format("{}: {} holds NaN or infinity", part, (*bad)->name());
  const bool are_all_held = std::ranges::all_of(
      parameters, [](const nn::Parameter* parameter) { return parameter->is_held(); });
  return fmt::format("{}: {} finite, so it is an overflow; compute in a wider --dtype", part,
                     are_all_held ? "its weights are" : "those of its weights that are held are");
}

/// Parameters of a layer, those of adapters on it included.
std::vector<nn::Parameter*> parameters_of_layer(models::DecoderLayer& layer,
                                                const nn::AdapterSet* adapters) {
  std::vector<nn::Parameter*> parameters;
  const auto add = [&](nn::Parameter& parameter) { parameters.push_back(&parameter); };
  layer.visit_parameters(add);
  if (adapters == nullptr) return parameters;
  layer.visit_linears([&](nn::Linear& linear) { adapters->visit_factors(linear, add); });
  layer.visit_expert_weights(
      [&](nn::ExpertWeights& weights) { adapters->visit_factors(weights, add); });
  return parameters;
}

}  // namespace

std::string find_not_finite(ModelOnRanks& placed, const std::vector<std::int32_t>& tokens,
                            const nn::AdapterSet* adapters) {
  if (placed.context.mesh.world_size() > 1) return "a layer of one of the ranks";
  const ops::NoGradient guard;
  Model& model = *placed.model;
  const c10::Device device = placed.context.device;
  const auto count = static_cast<std::int64_t>(tokens.size());
  const std::vector<std::int64_t> ids(tokens.begin(), tokens.end());
  nn::Pass pass =
      model.pass(ops::Sequences::from_host({0, static_cast<std::int32_t>(count)}, device),
                 at::arange(count, at::kLong).to(device), count, /*training=*/false);
  if (adapters != nullptr) pass.adapters = {{adapters, count, {}}};
  at::Tensor hidden = model.embed(at::tensor(ids, at::kLong).to(device));
  if (!is_finite(hidden)) return explain("the embedding", {&model.embedding_weight()});
  const auto& layers = model.layers();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    for (std::size_t stage = 0; stage < layers[i]->stages(); ++stage)
      hidden = layers[i]->forward(stage, hidden, pass).hidden;
    if (!is_finite(hidden))
      return explain(fmt::format("layer {}", i), parameters_of_layer(*layers[i], adapters));
  }
  const bool is_normalized = is_finite(model.final_norm(hidden));
  std::vector<nn::Parameter*> ends = model.parameters();
  std::erase_if(ends, [](const nn::Parameter* parameter) {
    return parameter->name().find("layers.") != std::string::npos;
  });
  return explain(is_normalized ? "the head" : "the final norm", ends);
}

std::string not_finite_parameter(const ModelOnRanks& placed) {
  const ops::NoGradient guard;
  for (const nn::Parameter* parameter : placed.model->parameters()) {
    if (parameter->is_held() && !is_finite(parameter->owned())) return parameter->name();
  }
  return "";
}

}  // namespace heddle::assembly
