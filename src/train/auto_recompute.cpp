#include "train/auto_recompute.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "base/text.h"
#include "device/device.h"
#include "device/memory_meter.h"
#include "runtime/free_memory.h"

namespace heddle::train {

using parallel::Recompute;
using parallel::RecomputeProbe;

namespace {

constexpr double kGiB = 1u << 30;

LayerPolicies everything(const assembly::ModelOnRanks& setup) {
  return LayerPolicies(static_cast<std::size_t>(setup.model->config().num_hidden_layers()),
                       Recompute::kFull);
}

/// A pipeline with a probe.
class Probed {
 public:
  Probed(parallel::Pipeline& pipeline, RecomputeProbe& probe) : pipeline_(pipeline) {
    pipeline_.set_probe(&probe);
  }
  ~Probed() { pipeline_.set_probe(nullptr); }
  Probed(const Probed&) = delete;
  Probed& operator=(const Probed&) = delete;

 private:
  parallel::Pipeline& pipeline_;
};

}  // namespace

AutoRecompute::AutoRecompute(const config::TrainSection& train, assembly::ModelOnRanks& setup,
                             parallel::Pipeline& pipeline, Optimizer& optimizer,
                             std::int64_t most_tokens)
    : setup_(setup),
      pipeline_(pipeline),
      optimizer_(optimizer),
      world_(setup.context.mesh.world_group()),
      limit_bytes_(train.memory_limit_gib * kGiB),
      most_tokens_(most_tokens),
      policies_(everything(setup)) {}

std::int64_t AutoRecompute::recomputed_layers() const {
  return std::count_if(policies_.begin(), policies_.end(),
                       [](Recompute policy) { return policy != Recompute::kOff; });
}

void AutoRecompute::run(std::int64_t tokens, const std::function<void()>& step) {
  while (true) {
    const std::int64_t updates = optimizer_.updates(), steps = optimizer_.steps();
    std::string reason;
    try {
      return run_once(tokens, step);
    } catch (const c10::OutOfMemoryError& error) {
      // Other ranks wait for this one where the step stopped.
      if (world_.size() > 1 || optimizer_.updates() != updates) throw;
      reason = error.what_without_backtrace();
    }
    for (nn::Parameter* parameter : setup_.trainable) parameter->clear_gradient();
    optimizer_.set_steps(steps);
    keep_less(reason);
  }
}

void AutoRecompute::run_once(std::int64_t tokens, const std::function<void()>& step) {
  if (phase_ == Phase::kSettled) return step();
  if (phase_ == Phase::kWarmUp) {
    step();
    phase_ = Phase::kElementwise;
    return;
  }
  // log.profile_step of one rank: the next step then.
  if (world_.any(!device::MemoryMeter::is_possible())) return step();
  if (phase_ == Phase::kCompared) {
    compare(tokens, step);
  } else {
    measure(tokens, step);
  }
}

double AutoRecompute::scale(std::int64_t tokens) const {
  return tokens == 0
             ? 1
             : std::max(1.0, static_cast<double>(most_tokens_) / static_cast<double>(tokens));
}

double AutoRecompute::held_bytes() const {
  const c10::Device device = setup_.context.device;
  if (!device.is_cpu()) return static_cast<double>(device::memory(device).used_bytes);
  auto bytes = static_cast<double>(optimizer_.state_bytes());
  const auto add = [&](const nn::Parameter& parameter) {
    if (!parameter.is_held()) return;
    const bool is_whole = parameter.owned().numel() == parameter.value().numel();
    if (parameter.has_memory()) bytes += static_cast<double>(parameter.value().nbytes());
    if (!parameter.has_memory() || !is_whole)
      bytes += static_cast<double>(parameter.owned().nbytes());
  };
  setup_.model->visit_parameters(add);
  if (setup_.adapters) setup_.adapters->visit_parameters(add);
  return bytes;
}

double AutoRecompute::memory_there() const {
  const double there = held_bytes() + static_cast<double>(runtime::free_bytes(setup_.context));
  return limit_bytes_ > 0 ? std::min(there, limit_bytes_) : there;
}

void AutoRecompute::measure(std::int64_t tokens, const std::function<void()>& step) {
  const c10::Device device = setup_.context.device;
  const bool is_elementwise = phase_ == Phase::kElementwise;
  const double held = held_bytes();
  device::MemoryMeter meter(device);
  RecomputeProbe probe(device, meter, is_elementwise);
  {
    const Probed probed(pipeline_, probe);
    step();
    device::synchronize(device);
    probe.note_peak();
  }
  if (is_elementwise) {
    elementwise_ = probe.layers();
    phase_ = Phase::kKept;
    return;
  }
  costs_ = agreed_costs(probe.layers());
  for (const auto& [layer, of] : probe.layers()) step_rows_[layer] = of.rows;
  const comm::Mesh& mesh = setup_.context.mesh;
  step_.held_bytes = held;
  step_.scale = scale(tokens);
  step_.rows = static_cast<double>(most_tokens_) /
               static_cast<double>(mesh.size(comm::Dim::kCp) * mesh.size(comm::Dim::kTp));
  step_.moments = probe.moments();
  memory_bytes_ = memory_there();
  choose();
  say_choice();
}

std::vector<RecomputeCost> AutoRecompute::agreed_costs(const Layers& kept) const {
  const models::Config& model = setup_.model->config();
  const auto kind_of = [&](std::int64_t layer) {
    const auto i = static_cast<std::size_t>(layer);
    return Kind(model.layers[i].attention.has_value(), model.layers[i].moe.has_value());
  };
  const auto of_kind = [&](const Layers& layers, Kind kind) {
    std::vector<RecomputeProbe::Layer> chosen;
    for (const auto& [layer, of] : layers) {
      if (kind_of(layer) == kind) chosen.push_back(of);
    }
    return chosen;
  };
  // Ranks of other stages may have the only layers of a kind, and no two clocks agree.
  nlohmann::json own = nlohmann::json::array();
  const std::vector<Kind> kinds = {{false, false}, {false, true}, {true, false}, {true, true}};
  for (const Kind& kind : kinds) {
    const auto all = of_kind(kept, kind), narrow = of_kind(elementwise_, kind);
    const RecomputeCost cost =
        all.empty() || narrow.empty() ? RecomputeCost() : RecomputeCost::of(all, narrow);
    own.push_back({cost.bytes, cost.seconds});
  }
  std::map<Kind, RecomputeCost> most;
  for (const std::string& text : world_.all_gather_objects(own.dump())) {
    const auto of_rank = nlohmann::json::parse(text);
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      RecomputeCost& cost = most[kinds[i]];
      for (std::size_t p = 0; p < parallel::kRecomputePolicies; ++p) {
        cost.bytes[p] = std::max(cost.bytes[p], of_rank[i][0][p].get<double>());
        cost.seconds[p] = std::max(cost.seconds[p], of_rank[i][1][p].get<double>());
      }
    }
  }
  std::vector<RecomputeCost> by_layer;
  for (std::int64_t i = 0; i < model.num_hidden_layers(); ++i) by_layer.push_back(most[kind_of(i)]);
  return by_layer;
}

double AutoRecompute::peak(const LayerPolicies& policies) const {
  return step_.peak(costs_, policies) + beyond_bytes_;
}

bool AutoRecompute::fits(const LayerPolicies& policies, double share) const {
  return !world_.any(peak(policies) > share * memory_bytes_);
}

void AutoRecompute::choose() {
  LayerPolicies chosen = choose_recompute(
      costs_, [&](const LayerPolicies& policies) { return fits(policies, 1 - kReserve); });
  phase_ = Phase::kCompared;
  if (chosen == everything(setup_)) {
    if (!fits(chosen, 1)) {
      const Need need = agreed_need(chosen);
      refuse(fmt::format("a step needs {}, of which {} are held between steps, and {} are there",
                         text::format_bytes(need.peak), text::format_bytes(step_.held_bytes),
                         text::format_bytes(need.memory)));
    }
    if (!fits(chosen, 1 - kReserve) && world_.rank() == 0) {
      log::warning(
          "train.recompute: even with everything recomputed less than {:.0f} % of the memory "
          "are left in reserve",
          100 * kReserve);
    }
    // There is nothing to fall back to.
    phase_ = Phase::kSettled;
  }
  apply(std::move(chosen));
}

void AutoRecompute::apply(LayerPolicies policies) {
  policies_ = std::move(policies);
  pipeline_.set_recompute(policies_);
}

void AutoRecompute::compare(std::int64_t tokens, const std::function<void()>& step) {
  const double held = held_bytes();
  device::MemoryMeter meter(setup_.context.device);
  step();
  const double found = held + static_cast<double>(meter.take_peak());
  const double predicted = step_.peak(costs_, policies_, 1 / scale(tokens)) + beyond_bytes_;
  const double beyond = std::max(0.0, found - predicted);
  // The measurements are good to a part of the reserve.
  const bool exceeds = peak(policies_) + beyond > (1 - kReserve / 2) * memory_bytes_;
  phase_ = Phase::kSettled;
  if (!world_.any(exceeds)) return;
  if (exceeds) {
    log::warning(
        "train.recompute: auto: a step with {} took {} instead of {}, which leaves too little of "
        "{}: less is kept from here on",
        describe(policies_), text::format_bytes(found), text::format_bytes(predicted),
        text::format_bytes(memory_bytes_));
    beyond_bytes_ += beyond;
  }
  choose();
  say_choice();
}

void AutoRecompute::keep_less(const std::string& reason) {
  if (policies_ == everything(setup_)) refuse(reason);
  log::warning(
      "train.recompute: auto: the device ran out of memory with {}; the step runs again with less "
      "kept: {}",
      describe(policies_), reason.substr(0, reason.find('\n')));
  // Somebody else may have taken some since.
  memory_bytes_ = std::min(memory_bytes_, memory_there());
  const LayerPolicies before = policies_;
  while (policies_ == before) {
    beyond_bytes_ += kReserve * memory_bytes_;
    // Whatever the measurements say, everything recomputed has run before.
    if (!fits(everything(setup_), 1)) {
      apply(everything(setup_));
      phase_ = Phase::kSettled;
      break;
    }
    choose();
  }
  say_choice();
}

AutoRecompute::Need AutoRecompute::agreed_need(const LayerPolicies& policies) const {
  double seconds = 0;
  for (const auto& [layer, rows] : step_rows_) {
    const auto i = static_cast<std::size_t>(layer);
    seconds += rows * costs_[i].seconds[static_cast<std::size_t>(policies[i])];
  }
  const nlohmann::json own = {peak(policies), memory_bytes_, seconds};
  Need fullest;
  double room = 0;
  for (const std::string& text : world_.all_gather_objects(own.dump())) {
    const auto of_rank = nlohmann::json::parse(text).get<std::array<double, 3>>();
    fullest.seconds = std::max(fullest.seconds, of_rank[2]);
    if (fullest.memory > 0 && of_rank[1] - of_rank[0] >= room) continue;
    room = of_rank[1] - of_rank[0];
    fullest.peak = of_rank[0];
    fullest.memory = of_rank[1];
  }
  return fullest;
}

void AutoRecompute::say_choice() const {
  const Need need = agreed_need(policies_);
  const Need off = agreed_need(LayerPolicies(policies_.size(), Recompute::kOff));
  const Need full = agreed_need(everything(setup_));
  if (world_.rank() != 0) return;
  log::info(
      "train.recompute: auto: {}, {} of {} with micro-batches of {} tokens, {:.1f} ms of a step "
      "run again (off: {}; full: {}, {:.1f} ms)",
      describe(policies_), text::format_bytes(need.peak), text::format_bytes(need.memory),
      most_tokens_, 1e3 * need.seconds, text::format_bytes(off.peak), text::format_bytes(full.peak),
      1e3 * full.seconds);
}

void AutoRecompute::refuse(const std::string& found) const {
  throw_error<ConfigError>(
      "train.recompute: auto: micro-batches of {} tokens do not fit with everything recomputed: "
      "{}. Lower train.micro_batch_tokens or data.max_length, raise train.memory_limit_gib if it "
      "is set, hold less (optim.state_dtype, optim.offload, train.method: lora), or divide the "
      "model over more ranks (parallel.fsdp, parallel.tp, parallel.cp)",
      most_tokens_, found.substr(0, found.find('\n')));
}

std::unique_ptr<AutoRecompute> auto_recompute(const config::TrainSection& train,
                                              assembly::ModelOnRanks& setup,
                                              parallel::Pipeline& pipeline, Optimizer& optimizer,
                                              std::int64_t most_tokens) {
  if (train.recompute) return nullptr;
  return std::make_unique<AutoRecompute>(train, setup, pipeline, optimizer, most_tokens);
}

}  // namespace heddle::train
