#include "train/micro_batch.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "assembly/model_units.h"
#include "base/hash.h"
#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/context_parallel/context_parallel.h"
#include "train/auxiliary_loss.h"
#include "train/expert_load.h"

namespace heddle::train {

using objective::HeadResult;
using objective::LocalBatch;

namespace {

/// One step under way.
class StepRun {
 public:
  StepRun(models::Model& model, const adapters::LoraSet* adapters, parallel::Pipeline& pipeline,
          const std::vector<nn::Parameter*>& trainable, std::span<const data::Batch> batches,
          const std::vector<objective::HeadFunction>& heads, const MicroBatchOptions& options)
      : model_(model),
        adapters_(adapters),
        pipeline_(pipeline),
        trainable_(trainable),
        batches_(batches),
        heads_(heads),
        options_(options),
        ends_(assembly::end_units(model)),
        in_flight_(batches.size()) {
    const auto wide =
        at::TensorOptions().dtype(model.context().wide_dtype()).device(model.context().device);
    loss_.loss_sum = at::zeros({}, wide);
    for (std::size_t i = 0; i < options.metrics; ++i)
      loss_.metric_sums.push_back(at::zeros({}, wide));
    loss_.auxiliary_sum = at::zeros({}, wide);
    if (options.replays_experts) loss_.replayed = at::zeros({2}, wide.dtype(at::kLong));
    if (options.pooled_auxiliary_loss) {
      balance_.emplace(model.config().moe()->num_experts,
                       model.context().mesh.group(
                           {comm::Dim::kTp, comm::Dim::kCp, comm::Dim::kFsdp, comm::Dim::kDp}));
    }
  }

  void run(const parallel::PipelineAction& action) {
    parallel::Pipeline::Stage& stage = pipeline_.stages()[action.chunk];
    if (action.is_backward) {
      backward(stage, action.micro_batch, action.chunk);
    } else {
      forward(stage, action.micro_batch, action.chunk);
    }
  }
  /// Starts the sums of what stands before the layers, after its backward.
  void reduce_first(bool is_last) {
    for (const std::size_t unit : ends_.own_before) options_.sharding->reduce(unit, is_last);
  }
  /// Sums over all micro-batches. Routers count this rank's rows; the head's loss is whole on every
  /// rank along tp.
  MicroBatchLoss finish() {
    if (loss_.expert_load.defined()) {
      model_.tensor_group().all_reduce_sum(loss_.auxiliary_sum);
      model_.tensor_group().all_reduce_sum(loss_.expert_load);
    }
    if (loss_.replayed.defined()) model_.tensor_group().all_reduce_sum(loss_.replayed);
    return std::move(loss_);
  }

 private:
  /// A micro-batch between its first forward here and its last backward.
  struct InFlight {
    explicit InFlight(LocalBatch local, std::size_t chunks)
        : batch(std::move(local)), tapes(chunks) {}
    LocalBatch batch;
    std::vector<parallel::BlockRunner::Tape> tapes;
    at::Tensor embedded, grad_hidden;
  };

  std::vector<std::int64_t> hidden_sizes(const InFlight& current) const {
    return current.batch.hidden_sizes(model_);
  }
  at::TensorOptions hidden_options() const {
    return at::TensorOptions().dtype(model_.context().dtype).device(model_.context().device);
  }

  void forward(parallel::Pipeline::Stage& stage, std::int64_t m, std::int64_t chunk) {
    if (!in_flight_[m]) {
      const auto i = static_cast<std::size_t>(m);
      in_flight_[m] = std::make_unique<InFlight>(
          options_.uploaded.empty()
              ? LocalBatch(model_, batches_[i], adapters_, options_.dropout_step, options_.neftune)
              : options_.uploaded[i],
          pipeline_.stages().size());
    }
    InFlight& current = *in_flight_[m];
    nn::Pass pass = current.batch.pass(model_, /*training=*/true);
    pass.pooled_auxiliary_loss = options_.pooled_auxiliary_loss;
    at::Tensor hidden, balance_before;
    bool wants_input_gradient = stage.sends_gradient;
    if (balance_ && !stage.is_first) {
      balance_before = pipeline_.receive_hidden(stage, m, {balance_->sums_size()},
                                                loss_.auxiliary_sum.options());
    }
    if (stage.is_first) {
      ++begun_;
      const parallel::Acquired table(options_.sharding, ends_.before);
      hidden = current.embedded = current.batch.embed(model_);
      wants_input_gradient = hidden.requires_grad();
    } else {
      hidden = pipeline_.receive_hidden(stage, m, hidden_sizes(current), hidden_options());
    }
    parallel::BlockRunner::Tape& tape = current.tapes[chunk];
    const data::Batch& host = current.batch.host;
    if (host.experts.defined()) {
      tape.experts =
          experts_of_batch(host, own_rows(host), real_rows(host), model_.config(),
                           stage.first_layer, stage.runner.size(), model_.context().device);
    } else if (options_.router != nullptr) {
      tape.experts =
          options_.router->choices(stage.first_layer, stage.runner.size(), own_tokens(host));
    }
    nn::RouterAgreement agreement;
    if (loss_.replayed.defined() && !tape.experts.empty()) {
      agreement = agreement_of(host, tape.experts);
      pass.agreement = &agreement;
    }
    hidden = stage.runner.forward(hidden, pass, wants_input_gradient, tape);
    if (options_.router != nullptr)
      options_.router->add(stage.first_layer, tape.experts, own_tokens(host));
    add_losses(tape, host, stage.first_layer);
    if (balance_) balance_forward(stage, m, tape, balance_before);
    if (!stage.is_last) return pipeline_.send_hidden(stage, m, hidden);
    const HeadResult head = apply_head(m, hidden, current.batch);
    current.grad_hidden = head.grad_hidden;
    loss_.loss_sum.add_(head.loss_sum);
    for (std::size_t i = 0; i < head.metric_sums.size(); ++i)
      loss_.metric_sums.at(i).add_(head.metric_sums[i]);
  }

  HeadResult apply_head(std::int64_t m, const at::Tensor& hidden, const LocalBatch& batch) {
    HeadResult head;
    {
      const parallel::Acquired weights(options_.sharding, ends_.behind);
      head = heads_[m](hidden, batch);
    }
    if (options_.sharding != nullptr) {
      // The rest of the backward does not touch them.
      for (nn::Parameter* parameter : trainable_) parameter->collect_gradient();
      for (const std::size_t unit : ends_.own_behind) options_.sharding->reduce(unit, is_last(m));
    }
    return head;
  }

  ops::Rows own_rows(const data::Batch& batch) const {
    return ops::own_rows(batch.size(), model_.tensor_group());
  }
  /// The rows of this rank's hidden states as the router's record knows them.
  RouterReplay::Tokens own_tokens(const data::Batch& batch) const {
    const ops::Rows own = own_rows(batch);
    return {batch.token_numbers.narrow(0, own.first, own.count),
            ops::real_rows(own, batch.real_tokens)};
  }

  /// For a stage that is given these experts by layer; counts its choices.
  nn::RouterAgreement agreement_of(const data::Batch& host, const std::vector<at::Tensor>& given) {
    const ops::Rows own = own_rows(host);
    at::Tensor counted = at::zeros({host.size()}, at::kLong);
    counted.narrow(0, 0, host.real_tokens).fill_(1);
    auto* const of_token = counted.mutable_data_ptr<std::int64_t>();
    // Generation has not read the last token of a sequence, and chose nothing for it.
    if (host.experts.defined()) {
      for (const std::int64_t last : host.last_tokens) of_token[last] = 0;
    }
    counted = counted.narrow(0, own.first, own.count);
    const auto rows = counted.sum().item<std::int64_t>();
    for (const at::Tensor& experts : given) {
      if (experts.defined()) loss_.replayed[0] += rows * experts.size(1);
    }
    return {device::upload(counted, model_.context().device), loss_.replayed[1]};
  }

  bool is_last(std::int64_t m) const { return m + 1 == static_cast<std::int64_t>(batches_.size()); }

  std::int64_t real_rows(const data::Batch& batch) const {
    return ops::real_rows(own_rows(batch), batch.real_tokens);
  }

  // Sums for the balance of all layers go from stage to stage ahead of the hidden states and
  // in front of their gradients.
  void balance_forward(const parallel::Pipeline::Stage& stage, std::int64_t m,
                       parallel::BlockRunner::Tape& tape, const at::Tensor& before) {
    const at::Tensor sums = balance_->sums(tape, real_rows(in_flight_[m]->batch.host), before,
                                           loss_.auxiliary_sum.options());
    if (!stage.is_last) return pipeline_.send_hidden(stage, m, sums);
    const PooledBalance::Closed closed = balance_->close(sums);
    tape.auxiliary_gradient = closed.gradient;
    loss_.auxiliary_sum.add_(closed.loss);
  }
  void balance_backward(const parallel::Pipeline::Stage& stage, std::int64_t m,
                        parallel::BlockRunner::Tape& tape) {
    if (!stage.is_last) {
      tape.auxiliary_gradient = pipeline_.receive_gradient(stage, m, {balance_->gradient_size()},
                                                           loss_.auxiliary_sum.options());
    }
    if (stage.sends_gradient) pipeline_.send_gradient(stage, m, tape.auxiliary_gradient);
  }

  void add_losses(const parallel::BlockRunner::Tape& tape, const data::Batch& batch,
                  std::int64_t first_layer) {
    const models::Config& config = model_.config();
    if (!balance_ && tape.auxiliary_loss.defined()) loss_.auxiliary_sum.add_(tape.auxiliary_loss);
    const at::Tensor load = expert_load(tape.experts, first_layer, config.sparse_layers(),
                                        config.is_moe() ? config.moe()->num_experts : 0,
                                        real_rows(batch), model_.context().device);
    if (!load.defined()) return;
    loss_.expert_load = loss_.expert_load.defined() ? loss_.expert_load.add_(load) : load;
  }

  void backward(parallel::Pipeline::Stage& stage, std::int64_t m, std::int64_t chunk) {
    InFlight& current = *in_flight_[m];
    if (stage.has_backward) {
      if (balance_) balance_backward(stage, m, current.tapes[chunk]);
      const at::Tensor incoming =
          stage.is_last
              ? current.grad_hidden
              : pipeline_.receive_gradient(stage, m, hidden_sizes(current), hidden_options());
      const at::Tensor outgoing =
          stage.runner.backward(incoming, options_.auxiliary_scale, current.tapes[chunk],
                                is_last(m), begun_ < batches_.size());
      if (stage.sends_gradient) pipeline_.send_gradient(stage, m, outgoing);
      if (stage.is_first && outgoing.defined() && current.embedded.requires_grad())
        ops::run_backward({current.embedded}, {outgoing});
      for (nn::Parameter* parameter : trainable_) parameter->collect_gradient();
    }
    if (chunk > 0) return;
    in_flight_[m].reset();
    // The last one comes after everything else: see run_micro_batches.
    if (options_.sharding != nullptr && !is_last(m)) reduce_first(/*is_last=*/false);
  }

  models::Model& model_;
  const adapters::LoraSet* adapters_;
  parallel::Pipeline& pipeline_;
  const std::vector<nn::Parameter*>& trainable_;
  std::span<const data::Batch> batches_;
  const std::vector<objective::HeadFunction>& heads_;
  const MicroBatchOptions& options_;
  parallel::EndUnits ends_;
  std::size_t begun_ = 0;  ///< Micro-batches whose first stage ran here.
  std::vector<std::unique_ptr<InFlight>> in_flight_;
  MicroBatchLoss loss_;
  std::optional<PooledBalance> balance_;
};

}  // namespace

objective::Neftune neftune_of(const config::TrainSection& train) {
  return {train.neftune_alpha, hash::of("neftune", train.seed)};
}

MicroBatchLoss run_micro_batches(models::Model& model, const adapters::LoraSet* adapters,
                                 parallel::Pipeline& pipeline,
                                 const std::vector<nn::Parameter*>& trainable,
                                 std::span<const data::Batch> batches,
                                 const std::vector<objective::HeadFunction>& heads,
                                 const MicroBatchOptions& options) {
  StepRun run(model, adapters, pipeline, trainable, batches, heads, options);
  for (const parallel::PipelineAction& action :
       pipeline.actions(static_cast<std::int64_t>(batches.size()))) {
    run.run(action);
    pipeline.drop_arrived(action);
  }
  pipeline.finish_sends();
  if (options.sharding != nullptr) run.reduce_first(/*is_last=*/true);
  return run.finish();
}

void sum_over_ranks(const comm::Group& group, bool has_auxiliary, MicroBatchLoss& sums) {
  if (group.size() == 1) return;
  std::vector<at::Tensor> numbers = sums.metric_sums;
  numbers.insert(numbers.begin(), sums.loss_sum);
  at::Tensor totals = at::stack(numbers);
  group.all_reduce_sum(totals);
  sums.loss_sum = totals[0];
  for (std::size_t i = 0; i < sums.metric_sums.size(); ++i)
    sums.metric_sums[i] = totals[static_cast<std::int64_t>(i) + 1];
  if (has_auxiliary) group.all_reduce_sum(sums.auxiliary_sum);
  if (sums.expert_load.defined()) group.all_reduce_sum(sums.expert_load);
  if (sums.replayed.defined()) group.all_reduce_sum(sums.replayed);
}

}  // namespace heddle::train
