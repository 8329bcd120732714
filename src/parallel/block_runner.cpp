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

bool BlockEntry::is_trained() const {
  return takes_adapters ||
         std::any_of(parameters.begin(), parameters.end(),
                     [](const nn::Parameter* parameter) { return parameter->trainable(); });
}

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

BlockRunner::Tape::Graph BlockRunner::run(std::size_t block, std::size_t stage,
                                          const at::Tensor& input, const nn::Pass& pass,
                                          nn::BlockOutput& output) {
  Tape::Graph graph{ops::detached(input), {}, {}};
  graph.input.set_requires_grad(true);
  output = blocks_[block].block->forward(stage, graph.input, pass);
  graph.output = output.hidden;
  graph.auxiliary = output.auxiliary_loss;
  return graph;
}

at::Tensor BlockRunner::forward(const at::Tensor& hidden, const nn::Pass& pass,
                                bool wants_input_gradient, Tape& tape) {
  TORCH_CHECK(!pass.cached, "a pass over cached sequences has no gradient");
  tape.pass = pass;
  TORCH_CHECK(tape.experts.empty() || tape.experts.size() == blocks_.size(),
              "router replay: the choices of ", tape.experts.size(), " blocks for ",
              blocks_.size());
  tape.experts.resize(blocks_.size());
  bool differentiates = wants_input_gradient;
  at::Tensor current = ops::detached(hidden);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    differentiates = differentiates || blocks_[i].is_trained();
    acquire(i);
    if (i + 1 < blocks_.size()) {
      prefetch(i + 1);
    } else {
      prefetch_units(options_.ends.behind);
    }
    tape.pass.experts = tape.experts[i];
    tape.pass.recompute_elementwise = recompute_[i] != Recompute::kOff;
    for (std::size_t stage = 0; stage < blocks_[i].block->stages(); ++stage) {
      const bool recomputed = is_recomputed(i, stage);
      const bool joins = recomputed && stage > 0 && is_recomputed(i, stage - 1);
      if (differentiates && joins) ++tape.islands.back().stages;
      if (differentiates && !joins) {
        offload_newest(tape);
        tape.islands.push_back({i, stage, 1, {}, {}});
        if (recomputed) tape.islands.back().input.on_device = current;
      }
      nn::BlockOutput output;
      if (differentiates && !recomputed) {
        tape.islands.back().graphs.push_back(run(i, stage, current, tape.pass, output));
      } else {
        output = ops::run_without_gradient(
            [&] { return blocks_[i].block->forward(stage, current, tape.pass); });
      }
      if (output.experts.defined()) tape.experts[i] = output.experts;
      add_up(tape.auxiliary_loss, output.auxiliary_loss);
      add_up(tape.expert_assignments, output.expert_assignments);
      current = ops::detached(output.hidden);
    }
    if (probe_ != nullptr && differentiates) {
      probe_->note_peak();
      probe_->keep(layer_of(i), current.size(0), static_cast<std::int64_t>(current.nbytes()));
    }
    release(i);
  }
  tape.pass.agreement = nullptr;  // what runs again counts no more
  return current;
}

void BlockRunner::offload_newest(Tape& tape) {
  if (!offload_ || tape.islands.empty() || !tape.islands.back().input.on_device.defined()) return;
  // Work that has run since has covered the copy of the one before.
  if (tape.sent) offload_->release(tape.islands[*tape.sent].input);
  offload_->send(tape.islands.back().input);
  tape.sent = tape.islands.size() - 1;
}

at::Tensor BlockRunner::take(KeptActivation& input) {
  const KeptActivation kept = std::exchange(input, {});
  return offload_ ? offload_->take(kept) : kept.on_device;
}

void BlockRunner::recompute(const Tape& tape, Tape::Island& island, at::Tensor current) {
  nn::Pass pass = tape.pass;
  pass.experts = tape.experts[island.block];
  pass.recompute_elementwise = true;
  const std::int64_t layer = layer_of(island.block);
  const std::size_t end = island.first_stage + island.stages;
  for (std::size_t stage = island.first_stage; stage < end; ++stage) {
    if (stage + 1 == end) {
      pass.recompute_elementwise = false;  // its backward follows at once
      pass.output_unused = true;
    }
    if (probe_ != nullptr) pass.recompute_elementwise = probe_->elementwise();
    nn::BlockOutput output;
    const auto run_stage = [&] {
      island.graphs.push_back(run(island.block, stage, current, pass, output));
    };
    if (probe_ != nullptr) {
      probe_->measure_forward(layer, stage, run_stage);
    } else {
      run_stage();
    }
    current = ops::detached(output.hidden);
  }
}

at::Tensor BlockRunner::differentiate(const Tape& tape, Tape::Graph graph,
                                      const at::Tensor& gradient, double auxiliary_scale) {
  ops::Tensors outputs = {graph.output}, gradients = {gradient};
  if (graph.auxiliary.defined() && graph.auxiliary.requires_grad() && auxiliary_scale != 0) {
    outputs.push_back(graph.auxiliary);
    const auto options = graph.auxiliary.options().requires_grad(false);
    gradients.push_back(ops::run_without_gradient([&] {
      return tape.auxiliary_gradient.defined() ? tape.auxiliary_gradient.mul(auxiliary_scale)
                                               : at::full({}, auxiliary_scale, options);
    }));
  }
  ops::run_backward(outputs, gradients);
  return graph.input.grad();
}

at::Tensor BlockRunner::backward(const at::Tensor& grad_hidden, double auxiliary_scale, Tape& tape,
                                 bool is_last, bool goes_on) {
  at::Tensor gradient = grad_hidden;
  if (probe_ != nullptr) probe_->note_peak();
  while (!tape.islands.empty()) {
    Tape::Island island = std::move(tape.islands.back());
    tape.islands.pop_back();
    acquire(island.block);
    if (island.first_stage == 0 && !tape.islands.empty()) {
      prefetch(tape.islands.back().block);
    } else if (tape.islands.empty() && goes_on) {
      prefetch_units(options_.ends.before);
    }
    const bool is_next_recomputed = !tape.islands.empty() && tape.islands.back().graphs.empty();
    if (offload_ && is_next_recomputed) offload_->prefetch(tape.islands.back().input);
    if (island.graphs.empty()) recompute(tape, island, take(island.input));
    while (!island.graphs.empty()) {
      Tape::Graph graph = std::move(island.graphs.back());
      island.graphs.pop_back();
      const auto differentiate_stage = [&] {
        gradient = differentiate(tape, std::move(graph), gradient, auxiliary_scale);
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

at::Tensor BlockRunner::evaluate(at::Tensor hidden, const nn::Pass& pass,
                                 std::vector<at::Tensor>* experts) {
  const ops::NoGradient guard;
  nn::Pass of_block = pass;
  if (experts != nullptr) experts->resize(blocks_.size());
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    acquire(i);
    if (i + 1 < blocks_.size()) prefetch(i + 1);
    if (experts != nullptr) of_block.experts = (*experts)[i];
    at::Tensor chosen;
    for (std::size_t stage = 0; stage < blocks_[i].block->stages(); ++stage) {
      nn::BlockOutput output = blocks_[i].block->forward(stage, hidden, of_block);
      hidden = std::move(output.hidden);
      if (output.experts.defined()) chosen = std::move(output.experts);
    }
    if (experts != nullptr) (*experts)[i] = std::move(chosen);
    release(i);
  }
  return hidden;
}

}  // namespace heddle::parallel
