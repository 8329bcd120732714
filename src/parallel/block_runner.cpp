#include "parallel/block_runner.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <utility>

#include "ops/autograd.h"

namespace heddle::parallel {
namespace {

/// sum += value, detached; undefined is 0.
void add_up(at::Tensor& sum, const at::Tensor& value) {
  if (!value.defined()) return;
  sum = sum.defined() ? ops::run_without_gradient([&] { return sum.add(value); })
                      : ops::detached(value);
}

}  // namespace

BlockRunner::BlockRunner(std::vector<BlockEntry> blocks, BlockRunnerOptions options)
    : blocks_(std::move(blocks)),
      options_(std::move(options)),
      recompute_(blocks_.size(), options_.recompute) {
  if (options_.offload_from) offload_.emplace(*options_.offload_from);
}

void BlockRunner::set_recompute(std::vector<Recompute> by_block) {
  TORCH_CHECK(by_block.size() == blocks_.size(), "recomputation of ", by_block.size(),
              " blocks for ", blocks_.size());
  recompute_ = std::move(by_block);
}

void BlockRunner::set_probe(RecomputeProbe* probe, std::int64_t first_layer) {
  TORCH_CHECK(
      probe == nullptr || std::all_of(recompute_.begin(), recompute_.end(),
                                      [](Recompute policy) { return policy == Recompute::kFull; }),
      "only blocks that are recomputed in full are measured");
  probe_ = probe;
  first_layer_ = first_layer;
}

void BlockRunner::acquire(std::size_t block) {
  if (options_.sharding != nullptr) options_.sharding->acquire(blocks_[block].unit);
}

void BlockRunner::prefetch(std::size_t block) { prefetch_units({blocks_[block].unit}); }

void BlockRunner::prefetch_units(const std::vector<std::size_t>& units) {
  if (options_.sharding == nullptr) return;
  for (const std::size_t unit : units) options_.sharding->prefetch(unit);
}

void BlockRunner::release(std::size_t block) {
  if (options_.sharding != nullptr) options_.sharding->release(blocks_[block].unit);
}

bool BlockRunner::is_recomputed(std::size_t block, std::size_t stage) const {
  return recompute_[block] == Recompute::kFull ||
         (recompute_[block] == Recompute::kSelective && stage > 0);
}

BlockRunner::Pass::Graph BlockRunner::run(std::size_t block, std::size_t stage,
                                          const at::Tensor& input, const nn::BlockInputs& inputs,
                                          nn::BlockOutput& output) {
  Pass::Graph graph{ops::detached(input), {}, {}};
  graph.input.set_requires_grad(true);
  output = blocks_[block].block->forward(stage, graph.input, inputs);
  graph.output = output.hidden;
  graph.auxiliary = output.auxiliary_loss;
  return graph;
}

at::Tensor BlockRunner::forward(const at::Tensor& hidden, const nn::BlockInputs& inputs,
                                bool wants_input_gradient, Pass& pass) {
  pass.inputs = inputs;
  TORCH_CHECK(pass.experts.empty() || pass.experts.size() == blocks_.size(),
              "router replay: the choices of ", pass.experts.size(), " blocks for ",
              blocks_.size());
  pass.experts.resize(blocks_.size());
  bool differentiates = wants_input_gradient;
  at::Tensor current = ops::detached(hidden);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    differentiates =
        differentiates ||
        std::any_of(blocks_[i].parameters.begin(), blocks_[i].parameters.end(),
                    [](const nn::Parameter* parameter) { return parameter->trainable(); });
    acquire(i);
    if (i + 1 < blocks_.size()) {
      prefetch(i + 1);
    } else {
      prefetch_units(options_.ends.behind);
    }
    pass.inputs.experts = pass.experts[i];
    pass.inputs.recompute_elementwise = recompute_[i] != Recompute::kOff;
    for (std::size_t stage = 0; stage < blocks_[i].block->stages(); ++stage) {
      const bool recomputed = is_recomputed(i, stage);
      const bool joins = recomputed && stage > 0 && is_recomputed(i, stage - 1);
      if (differentiates && joins) ++pass.islands.back().stages;
      if (differentiates && !joins) {
        offload_newest(pass);
        pass.islands.push_back({i, stage, 1, {}, {}});
        if (recomputed) pass.islands.back().input.on_device = current;
      }
      nn::BlockOutput output;
      if (differentiates && !recomputed) {
        pass.islands.back().graphs.push_back(run(i, stage, current, pass.inputs, output));
      } else {
        output = ops::run_without_gradient(
            [&] { return blocks_[i].block->forward(stage, current, pass.inputs); });
      }
      if (output.experts.defined()) pass.experts[i] = output.experts;
      add_up(pass.auxiliary_loss, output.auxiliary_loss);
      add_up(pass.expert_assignments, output.expert_assignments);
      current = ops::detached(output.hidden);
    }
    if (probe_ != nullptr && differentiates) {
      probe_->note_peak();
      probe_->keep(layer_of(i), current.size(0), static_cast<std::int64_t>(current.nbytes()));
    }
    release(i);
  }
  return current;
}

void BlockRunner::offload_newest(Pass& pass) {
  if (!offload_ || pass.islands.empty() || !pass.islands.back().input.on_device.defined()) return;
  // What has run since has covered the copy of the one before.
  if (pass.sent) offload_->release(pass.islands[*pass.sent].input);
  offload_->send(pass.islands.back().input);
  pass.sent = pass.islands.size() - 1;
}

at::Tensor BlockRunner::take(KeptActivation& input) {
  const KeptActivation kept = std::exchange(input, {});
  return offload_ ? offload_->take(kept) : kept.on_device;
}

void BlockRunner::recompute(const Pass& pass, Pass::Island& island, at::Tensor current) {
  nn::BlockInputs inputs = pass.inputs;
  inputs.experts = pass.experts[island.block];
  inputs.recompute_elementwise = true;
  const std::int64_t layer = layer_of(island.block);
  const std::size_t end = island.first_stage + island.stages;
  for (std::size_t stage = island.first_stage; stage < end; ++stage) {
    if (stage + 1 == end) {
      inputs.recompute_elementwise = false;  // its backward follows at once
      inputs.output_unused = true;
    }
    if (probe_ != nullptr) inputs.recompute_elementwise = probe_->elementwise();
    nn::BlockOutput output;
    const auto run_stage = [&] {
      island.graphs.push_back(run(island.block, stage, current, inputs, output));
    };
    if (probe_ != nullptr) {
      probe_->measure_forward(layer, stage, run_stage);
    } else {
      run_stage();
    }
    current = ops::detached(output.hidden);
  }
}

at::Tensor BlockRunner::differentiate(const Pass& pass, Pass::Graph graph,
                                      const at::Tensor& gradient, double auxiliary_scale) {
  ops::Tensors outputs = {graph.output}, gradients = {gradient};
  if (graph.auxiliary.defined() && graph.auxiliary.requires_grad() && auxiliary_scale != 0) {
    outputs.push_back(graph.auxiliary);
    const auto options = graph.auxiliary.options().requires_grad(false);
    gradients.push_back(ops::run_without_gradient([&] {
      return pass.auxiliary_gradient.defined() ? pass.auxiliary_gradient.mul(auxiliary_scale)
                                               : at::full({}, auxiliary_scale, options);
    }));
  }
  ops::run_backward(outputs, gradients);
  return graph.input.grad();
}

at::Tensor BlockRunner::backward(const at::Tensor& grad_hidden, double auxiliary_scale, Pass& pass,
                                 bool is_last, bool goes_on) {
  at::Tensor gradient = grad_hidden;
  if (probe_ != nullptr) probe_->note_peak();
  while (!pass.islands.empty()) {
    Pass::Island island = std::move(pass.islands.back());
    pass.islands.pop_back();
    acquire(island.block);
    if (island.first_stage == 0 && !pass.islands.empty()) {
      prefetch(pass.islands.back().block);
    } else if (pass.islands.empty() && goes_on) {
      prefetch_units(options_.ends.before);
    }
    const bool is_next_recomputed = !pass.islands.empty() && pass.islands.back().graphs.empty();
    if (offload_ && is_next_recomputed) offload_->prefetch(pass.islands.back().input);
    if (island.graphs.empty()) recompute(pass, island, take(island.input));
    while (!island.graphs.empty()) {
      Pass::Graph graph = std::move(island.graphs.back());
      island.graphs.pop_back();
      const auto differentiate_stage = [&] {
        gradient = differentiate(pass, std::move(graph), gradient, auxiliary_scale);
      };
      if (probe_ != nullptr) {
        probe_->measure_backward(layer_of(island.block), island.graphs.size(), differentiate_stage);
      } else {
        differentiate_stage();
      }
    }
    if (probe_ != nullptr) {
      // Its own graphs are in the peak as they are where they are kept.
      probe_->release(layer_of(island.block), static_cast<std::int64_t>(gradient.nbytes()));
      probe_->note_peak();
    }
    if (island.first_stage == 0) {
      for (nn::Parameter* parameter : blocks_[island.block].parameters)
        parameter->collect_gradient();
      release(island.block);
      if (options_.sharding != nullptr)
        options_.sharding->reduce(blocks_[island.block].unit, is_last);
    }
  }
  return gradient;
}

at::Tensor BlockRunner::evaluate(at::Tensor hidden, const nn::BlockInputs& inputs) {
  const ops::NoGradient guard;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    acquire(i);
    if (i + 1 < blocks_.size()) prefetch(i + 1);
    for (std::size_t stage = 0; stage < blocks_[i].block->stages(); ++stage) {
      hidden = blocks_[i].block->forward(stage, hidden, inputs).hidden;
    }
    release(i);
  }
  return hidden;
}

}  // namespace heddle::parallel
