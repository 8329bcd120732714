#pragma once

#include <map>
#include <string>
#include <vector>

#include "adapters/lora.h"
#include "assembly/model_units.h"
#include "objective/language_model.h"
#include "ops/autograd.h"
#include "parallel/block_runner.h"
#include "train/micro_batch.h"
#include "train/router_replay.h"

namespace heddle::testing {

struct Gradients {
  double loss = 0;
  std::map<std::string, at::Tensor> by_name;
};

/// One forward and backward of each batch, summed; batches are on the host. With `adapters` the
/// gradients are theirs; `router`, if any, is at its step.
inline Gradients differentiate(models::Model& model, const std::vector<data::Batch>& batches,
                               parallel::Recompute recompute, double auxiliary_scale = 0,
                               adapters::LoraSet* adapters = nullptr,
                               train::RouterReplay* router = nullptr) {
  parallel::Pipeline pipeline(assembly::block_entries(model, adapters),
                              model.embedding_weight().trainable(), {recompute});
  Gradients result;
  train::MicroBatchOptions options;
  options.auxiliary_scale = auxiliary_scale;
  options.router = router;
  std::vector<nn::Parameter*> trained = model.parameters();
  if (adapters != nullptr) {
    trained.clear();
    adapters->visit_parameters([&](nn::Parameter& parameter) { trained.push_back(&parameter); });
  }
  const std::vector<objective::HeadFunction> heads(batches.size(),
                                                   objective::language_model_head(model, 1));
  const auto loss =
      train::run_micro_batches(model, adapters, pipeline, trained, batches, heads, options);
  result.loss = loss.loss_sum.item<double>();
  for (nn::Parameter* parameter : trained) {
    result.by_name[parameter->name()] = parameter->gradient();
    parameter->clear_gradient();
  }
  return result;
}

}  // namespace heddle::testing
