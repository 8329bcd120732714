#pragma once

#include <map>
#include <string>
#include <vector>

#include "ops/autograd.h"
#include "parallel/block_runner.h"
#include "train/head.h"
#include "train/micro_batch.h"

namespace heddle::testing {

struct Gradients {
  double loss = 0;
  std::map<std::string, at::Tensor> by_name;
};

/// One forward and backward of each batch, summed; batches are on the host.
inline Gradients differentiate(models::qwen3_5::Model& model,
                               const std::vector<data::Batch>& batches,
                               parallel::Recompute recompute, double auxiliary_scale = 0) {
  parallel::Pipeline pipeline(train::block_entries(model), model.embedding_weight().trainable(),
                              {recompute});
  Gradients result;
  train::MicroBatchOptions options;
  options.auxiliary_scale = auxiliary_scale;
  const std::vector<train::HeadFunction> heads(batches.size(), train::training_head(model, 1));
  const auto loss = train::run_micro_batches(model, nullptr, pipeline, model.parameters(), batches,
                                             heads, options);
  result.loss = loss.loss_sum.item<double>();
  model.visit_parameters([&](nn::Parameter& parameter) {
    result.by_name[parameter.name()] = parameter.gradient();
    parameter.clear_gradient();
  });
  return result;
}

}  // namespace heddle::testing
