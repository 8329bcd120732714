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
                               parallel::Recompute recompute, double auxiliary_scale = 0,
                               bool recompute_elementwise = false) {
  parallel::BlockRunner runner(train::block_entries(model), recompute);
  Gradients result;
  for (const data::Batch& batch : batches) {
    train::MicroBatchOptions options;
    options.auxiliary_scale = auxiliary_scale;
    options.recompute_elementwise = recompute_elementwise;
    const auto loss = train::run_micro_batch(model, nullptr, runner, model.parameters(), batch,
                                             train::training_head(model, 1), options);
    result.loss += loss.loss_sum.item<double>();
  }
  model.visit_parameters([&](nn::Parameter& parameter) {
    result.by_name[parameter.name()] = parameter.gradient();
    parameter.clear_gradient();
  });
  return result;
}

}  // namespace heddle::testing
