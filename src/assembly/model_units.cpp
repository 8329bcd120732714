#include "assembly/model_units.h"

#include <set>
#include <utility>

namespace heddle::assembly {

namespace {

/// Whether the head is the embedding's matrix: other heads of a model with a tied one do without.
bool reads_embedding(const models::qwen3_5::Model& model) {
  return model.tied() && model.head() == models::qwen3_5::Head::kLanguageModel;
}

}  // namespace

std::size_t head_unit(const models::qwen3_5::Model& model) {
  return static_cast<std::size_t>(model.config().num_hidden_layers) + 1;
}

parallel::EndUnits end_units(const models::qwen3_5::Model& model) {
  if (reads_embedding(model)) return {{kEmbeddingUnit}, {kEmbeddingUnit, head_unit(model)}};
  return {{kEmbeddingUnit}, {head_unit(model)}};
}

parallel::Acquired acquire_ends(parallel::Sharding* sharding, const models::qwen3_5::Model& model) {
  return {sharding, {kEmbeddingUnit, head_unit(model)}};
}

std::vector<parallel::BlockEntry> block_entries(models::qwen3_5::Model& model) {
  std::vector<parallel::BlockEntry> entries;
  for (const auto& layer : model.layers()) {
    parallel::BlockEntry entry{layer.get(), {}, entries.size() + 1};
    const auto add = [&](nn::Parameter& parameter) { entry.parameters.push_back(&parameter); };
    layer->visit_parameters(add);
    layer->visit_linears([&](nn::Linear& linear) {
      if (linear.adapter() != nullptr) linear.adapter()->visit_parameters(add);
    });
    layer->visit_expert_weights([&](nn::ExpertWeights& weights) {
      if (weights.adapter() != nullptr) weights.adapter()->visit_parameters(add);
    });
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::unique_ptr<parallel::Sharding> shard_model(models::qwen3_5::Model& model,
                                                parallel::Sharding::Summing summing) {
  const c10::Device device = model.context().device;
  const auto member = [&](nn::Parameter& parameter) {
    return parallel::Sharding::Member{&parameter, model.dtype_of(parameter)};
  };
  std::set<const nn::Parameter*> in_blocks;
  std::vector<std::vector<parallel::Sharding::Member>> blocks;
  for (const auto& layer : model.layers()) {
    blocks.emplace_back();
    layer->visit_parameters([&](nn::Parameter& parameter) {
      in_blocks.insert(&parameter);
      blocks.back().push_back(member(parameter));
    });
  }
  std::vector<parallel::Sharding::Member> head;
  model.visit_parameters([&](nn::Parameter& parameter) {
    if (!in_blocks.contains(&parameter) && &parameter != &model.embedding_weight())
      head.push_back(member(parameter));
  });
  auto sharding = std::make_unique<parallel::Sharding>(model.context().mesh, summing);
  if (reads_embedding(model)) sharding->tie_over_stages(model.embedding_weight());
  sharding->add(kEmbeddingUnit, {member(model.embedding_weight())}, device);
  for (std::size_t i = 0; i < blocks.size(); ++i) sharding->add(i + 1, blocks[i], device);
  sharding->add(head_unit(model), head, device);
  return sharding;
}

void shard_adapters(models::qwen3_5::Model& model, adapters::LoraSet& adapters,
                    parallel::Sharding& sharding) {
  const c10::Device device = model.context().device;
  std::set<const nn::LinearAdapter*> in_blocks;
  const auto members_of = [&](nn::LinearAdapter& adapter) {
    std::vector<parallel::Sharding::Member> members;
    adapter.visit_parameters([&](nn::Parameter& parameter) {
      members.push_back({&parameter, model.context().dtype});
    });
    return members;
  };
  model.visit_linears([](nn::Linear& linear) {
    if (linear.adapter() == nullptr) return;
    linear.adapter()->visit_parameters(
        [&](nn::Parameter& parameter) { parameter.set_held(linear.weight().is_held()); });
  });
  model.visit_expert_weights([](nn::ExpertWeights& weights) {
    if (weights.adapter() == nullptr) return;
    weights.adapter()->visit_parameters(
        [&](nn::Parameter& parameter) { parameter.set_held(weights.weight().is_held()); });
  });
  const auto& layers = model.layers();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    std::vector<parallel::Sharding::Member> members;
    layers[i]->visit_linears([&](nn::Linear& linear) {
      if (linear.adapter() == nullptr) return;
      in_blocks.insert(linear.adapter());
      for (const auto& member : members_of(*linear.adapter())) members.push_back(member);
    });
    layers[i]->visit_expert_weights([&](nn::ExpertWeights& weights) {
      if (weights.adapter() == nullptr) return;
      weights.adapter()->visit_parameters([&](nn::Parameter& parameter) {
        members.push_back({&parameter, model.context().dtype});
      });
    });
    sharding.add(i + 1, members, device);
  }
  for (const auto& adapter : adapters.adapters()) {
    if (!in_blocks.contains(adapter.get()))
      sharding.add(head_unit(model), members_of(*adapter), device);
  }
}

}  // namespace heddle::assembly
