#include "assembly/put_on.h"

#include <utility>

#include "assembly/model_units.h"
#include "base/log.h"
#include "ckpt/hf_adapter.h"

namespace heddle::assembly {

std::unique_ptr<adapters::LoraSet> divided(NewAdapters adapters, ModelOnRanks& placed) {
  const models::WeightNames& names = placed.model->config().weights;
  adapters.options.excluded = names.not_adapted;
  // A plan makes the same model several times.
  if (!names.not_adapted.empty() && !placed.model->context().device.is_meta()) {
    log::info("adapter.targets: all-linear leaves out {}; name it to adapt it all the same",
              names.why_not_adapted);
  }
  auto set = std::make_unique<adapters::LoraSet>(ckpt::adaptable(*placed.model), adapters.targets,
                                                 adapters.target_parameters, adapters.options,
                                                 placed.model->context());
  if (placed.sharding) shard_adapters(*placed.model, *set, *placed.sharding);
  return set;
}

void start(const NewAdapters& adapters, const ModelOnRanks& placed, adapters::LoraSet& set) {
  set.initialize();
  if (!adapters.start) return;
  ckpt::fill_adapter(*adapters.start, *placed.model,
                     placed.source ? placed.source->path().string() : "", set);
}

std::unique_ptr<adapters::LoraSet> put_on(const NewAdapters& adapters, ModelOnRanks& placed) {
  auto set = divided(adapters, placed);
  start(adapters, placed, *set);
  if (placed.sharding) placed.sharding->publish();
  return set;
}

}  // namespace heddle::assembly
