#include "assembly/model_units.h"

#include <set>
#include <utility>

namespace heddle::assembly {

namespace {

/// True if the head is the embedding's matrix, as only that of a language model can be.
bool reads_embedding(const models::Model& model) {
  return model.tied() && model.head() == models::Head::kLanguageModel;
}

}  // namespace

std::size_t head_unit(const models::Model& model) {
  return static_cast<std::size_t>(model.config().num_hidden_layers()) + 1;
}

parallel::EndUnits end_units(const models::Model& model) {
  if (reads_embedding(model)) return {{kEmbeddingUnit}, {kEmbeddingUnit, head_unit(model)}};
  return {{kEmbeddingUnit}, {head_unit(model)}};
}

parallel::Acquired acquire_ends(parallel::Sharding* sharding, const models::Model& model) {
  return {sharding, {kEmbeddingUnit, head_unit(model)}};
}

std::vector<parallel::BlockEntry> block_entries(models::Model& model,
                                                const nn::AdapterSet* adapters) {
  std::vector<parallel::BlockEntry> entries;
  for (const auto& layer : model.layers()) {
    parallel::BlockEntry entry{layer.get(), {}, entries.size() + 1};
    const auto add = [&](nn::Parameter& parameter) { entry.parameters.push_back(&parameter); };
    layer->visit_parameters(add);
    if (adapters != nullptr) {
      layer->visit_linears([&](nn::Linear& linear) { adapters->visit_factors(linear, add); });
      layer->visit_expert_weights(
          [&](nn::ExpertWeights& weights) { adapters->visit_factors(weights, add); });
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::unique_ptr<parallel::Sharding> shard_model(models::Model& model,
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

void shard_adapters(models::Model& model, const adapters::LoraSet& adapters,
                    parallel::Sharding& sharding) {
  for (std::size_t i = 0; i < model.layers().size(); ++i) {
    std::vector<parallel::Sharding::Member> members;
    const auto take = [&](auto& layer) {
      adapters.visit_factors(layer, [&](nn::Parameter& factor) {
        factor.set_held(layer.weight().is_held());
        members.push_back({&factor, model.context().dtype});
      });
    };
    model.layers()[i]->visit_linears(take);
    model.layers()[i]->visit_expert_weights(take);
    sharding.add(i + 1, members, model.context().device);
  }
}

}  // namespace heddle::assembly
