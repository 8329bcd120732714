#include "train/micro_batch.h"

#include <algorithm>
#include <utility>

#include "data/context_share.h"
#include "ops/autograd.h"
#include "ops/context_parallel/context_parallel.h"
#include "train/auxiliary_loss.h"
#include "train/expert_load.h"

namespace heddle::train {

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

parallel::Recompute recompute_of(config::Recompute policy) {
  switch (policy) {
    case config::Recompute::kOff:
    case config::Recompute::kElementwise:
      return parallel::Recompute::kOff;
    case config::Recompute::kSelective:
      return parallel::Recompute::kSelective;
    case config::Recompute::kFull:
      return parallel::Recompute::kFull;
  }
  return parallel::Recompute::kOff;
}

LocalBatch::LocalBatch(const models::qwen3_5::Model& model, const data::Batch& whole)
    : host(whole) {
  host = data::with_dummy_tail(std::move(host), model.least_tokens());
  context = model.context_of(host.cu_seqlens_host);
  if (context) host = data::context_share(host, context->plan);
  device = host.to(model.context().device);
}

nn::BlockInputs LocalBatch::inputs(const models::qwen3_5::Model& model, bool training) const {
  nn::BlockInputs inputs =
      model.block_inputs({device.cu_seqlens, device.cu_seqlens_host, device.max_seqlen},
                         device.position_ids, device.real_tokens, training);
  inputs.context = context;
  return inputs;
}

HeadFunction training_head(models::qwen3_5::Model& model, double gradient_scale) {
  return [&model, gradient_scale](const at::Tensor& hidden, const data::Batch& batch) {
    return run_head(model, hidden, batch, gradient_scale, /*want_gradients=*/true);
  };
}

MicroBatchLoss run_micro_batch(models::qwen3_5::Model& model, adapters::LoraSet* adapters,
                               parallel::BlockRunner& runner,
                               const std::vector<nn::Parameter*>& trainable,
                               const data::Batch& host_batch, const HeadFunction& head_function,
                               const MicroBatchOptions& options) {
  if (options.sharding != nullptr) options.sharding->acquire(kRootUnit);
  const LocalBatch batch(model, host_batch);
  if (adapters != nullptr) adapters->set_dropout_stream(options.dropout_stream);
  nn::BlockInputs inputs = batch.inputs(model, /*training=*/true);
  inputs.recompute_elementwise = options.recompute_elementwise;
  inputs.pooled_auxiliary_loss = options.pooled_auxiliary_loss;
  const at::Tensor embedded = model.embed(batch.device.tokens);
  const bool embedding_trained = embedded.requires_grad();
  parallel::BlockRunner::Pass pass;
  const at::Tensor hidden = runner.forward(embedded, inputs, embedding_trained, pass);
  const HeadResult head = head_function(hidden, batch.host);
  MicroBatchLoss result{
      head.loss_sum, pass.auxiliary_loss,
      expert_load(pass.experts, model.config().num_experts, batch.host.real_tokens)};
  if (pass.expert_assignments.defined()) {
    const auto rows = static_cast<double>(sparse_layers(model.config()) * batch.host.real_tokens);
    result.auxiliary_sum = pool_auxiliary_loss(pass, std::max(rows, 1.0));
  }
  const at::Tensor gradient =
      runner.backward(head.grad_hidden, options.auxiliary_scale, pass, options.is_last);
  if (embedding_trained && gradient.defined()) ops::run_backward({embedded}, {gradient});
  for (nn::Parameter* parameter : trainable) parameter->collect_gradient();
  if (options.sharding != nullptr) {
    options.sharding->release(kRootUnit);
    if (options.is_last) options.sharding->reduce(kRootUnit);
  }
  return result;
}

}  // namespace heddle::train
