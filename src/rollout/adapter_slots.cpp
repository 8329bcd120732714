#include "rollout/adapter_slots.h"

#include <utility>

#include "assembly/model_units.h"
#include "base/errors.h"
#include "ckpt/hf_adapter.h"
#include "ops/autograd.h"

namespace heddle::rollout {

AdapterSlots::AdapterSlots(assembly::ModelOnRanks& placed, const adapters::LoraSet& like,
                           std::string name, std::int64_t count)
    : name_(std::move(name)) {
  std::vector<adapters::LoraSet::Module> modules;
  for (const auto& lora : like.adapters())
    modules.push_back({lora->module(), lora->rank(), lora->scaling()});
  for (const auto& lora : like.expert_adapters())
    modules.push_back({lora->parameter(), lora->rank(), lora->scaling()});
  for (std::int64_t i = 0; i < count; ++i) {
    auto set = std::make_shared<adapters::LoraSet>(ckpt::adaptable(*placed.model), modules,
                                                   like.options(), placed.context);
    // Versions are copied here, not trained: replicas have all of them each.
    set->visit_parameters([](nn::Parameter& factor) { factor.set_trainable(false); });
    if (placed.sharding) assembly::shard_adapters(*placed.model, *set, *placed.sharding);
    sets_.push_back(std::move(set));
  }
  if (placed.sharding) placed.sharding->freeze_untrained();
}

adapters::LoraSet* AdapterSlots::free_set(Engine& engine) {
  for (const auto& set : sets_) {
    if (engine.uses(*set)) continue;
    engine.forget_states(*set);
    return set.get();
  }
  return nullptr;
}

std::shared_ptr<const Adapter> AdapterSlots::publish(Engine& engine, const adapters::LoraSet& set,
                                                     std::int64_t version) {
  for (const auto& own : sets_) {
    if (own.get() != &set) continue;
    const auto adapter = std::make_shared<const Adapter>(Adapter{name_, version, own});
    engine.use_adapter(adapter);
    return adapter;
  }
  throw InternalError("a set of adapters is published that is not one of the slots");
}

void copy_factors(const adapters::LoraSet& from, const adapters::LoraSet& to) {
  const ops::NoGradient guard;
  std::vector<nn::Parameter*> sources;
  from.visit_parameters([&](nn::Parameter& factor) { sources.push_back(&factor); });
  std::size_t next = 0;
  to.visit_parameters([&](nn::Parameter& factor) {
    const nn::Parameter* const source = next < sources.size() ? sources[next++] : nullptr;
    if (source == nullptr || source->global_shape() != factor.global_shape())
      throw_error<InternalError>("the factor {} has no like in the other set", factor.name());
    if (!factor.is_held()) return;
    // Replicas divide what they train.
    const at::Tensor own = factor.owned(), theirs = source->owned();
    own.copy_(theirs.sizes() == own.sizes() ? theirs : source->data());
  });
}

}  // namespace heddle::rollout
