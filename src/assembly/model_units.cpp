#include "assembly/model_units.h"

#include <numeric>
#include <utility>

namespace heddle::assembly {

parallel::EndUnits end_units(const models::Model& model) {
  parallel::EndUnits ends;
  bool is_before = true;
  for (std::size_t i = 0; i < model.units().size(); ++i) {
    const models::Unit& unit = model.units()[i];
    is_before = is_before && unit.layer == nullptr;
    if (unit.layer != nullptr) continue;
    std::vector<std::size_t>& wanted = is_before ? ends.before : ends.behind;
    wanted.insert(wanted.end(), unit.reads.begin(), unit.reads.end());
    wanted.push_back(i);
    (is_before ? ends.own_before : ends.own_behind).push_back(i);
  }
  return ends;
}

parallel::Acquired acquire_ends(parallel::Sharding* sharding, const models::Model& model) {
  parallel::EndUnits ends = end_units(model);
  ends.own_before.insert(ends.own_before.end(), ends.own_behind.begin(), ends.own_behind.end());
  return {sharding, ends.own_before};
}

parallel::Acquired acquire_all(parallel::Sharding* sharding, const models::Model& model) {
  std::vector<std::size_t> units(model.units().size());
  std::iota(units.begin(), units.end(), std::size_t{0});
  return {sharding, std::move(units)};
}

std::vector<parallel::BlockEntry> block_entries(models::Model& model,
                                                const nn::AdapterSet* adapters) {
  std::vector<parallel::BlockEntry> entries;
  for (std::size_t i = 0; i < model.units().size(); ++i) {
    const models::Unit& unit = model.units()[i];
    if (unit.layer == nullptr) continue;
    parallel::BlockEntry entry{unit.layer, unit.parameters, i};
    const auto add = [&](nn::Parameter& parameter) { entry.parameters.push_back(&parameter); };
    if (adapters != nullptr) {
      unit.layer->visit_linears([&](nn::Linear& linear) { adapters->visit_factors(linear, add); });
      unit.layer->visit_expert_weights(
          [&](nn::ExpertWeights& weights) { adapters->visit_factors(weights, add); });
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::unique_ptr<parallel::Sharding> shard_model(models::Model& model, parallel::Summing summing) {
  auto sharding = std::make_unique<parallel::Sharding>(model.context().mesh, summing);
  for (std::size_t i = 0; i < model.units().size(); ++i) {
    const models::Unit& unit = model.units()[i];
    std::vector<parallel::Sharding::Member> members;
    for (nn::Parameter* parameter : unit.parameters)
      members.push_back({parameter, model.dtype_of(*parameter)});
    for (const std::size_t read : unit.reads) {
      for (nn::Parameter* parameter : model.units()[read].parameters)
        sharding->tie_over_stages(*parameter);
    }
    sharding->add(i, members, model.context().device);
  }
  return sharding;
}

void shard_adapters(models::Model& model, const adapters::LoraSet& adapters,
                    parallel::Sharding& sharding) {
  for (std::size_t i = 0; i < model.units().size(); ++i) {
    models::DecoderLayer* layer = model.units()[i].layer;
    if (layer == nullptr) continue;
    std::vector<parallel::Sharding::Member> members;
    const auto take = [&](auto& product) {
      adapters.visit_factors(product, [&](nn::Parameter& factor) {
        factor.set_held(product.weight().is_held());
        members.push_back({&factor, model.context().dtype});
      });
    };
    layer->visit_linears(take);
    layer->visit_expert_weights(take);
    sharding.add(i, members, model.context().device);
  }
}

}  // namespace heddle::assembly
