#include "train/recompute_choice.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>

#include <fmt/format.h>

#include "base/text.h"
#include "config/run_config.h"

namespace heddle::train {

using parallel::Recompute;
using parallel::RecomputeProbe;

namespace {

constexpr std::size_t index_of(Recompute policy) { return static_cast<std::size_t>(policy); }

constexpr std::array kPolicies = {Recompute::kOff, Recompute::kElementwise, Recompute::kSelective,
                                  Recompute::kFull};
static_assert(kPolicies.size() == parallel::kRecomputePolicies);

/// For one row: bytes the most of the layers', seconds the least.
struct PerRow {
  explicit PerRow(const std::vector<RecomputeProbe::Layer>& layers) {
    constexpr double kMost = std::numeric_limits<double>::max();
    for (RecomputeProbe::Stage& stage : stages) stage.forward_s = stage.backward_s = kMost;
    for (const RecomputeProbe::Layer& layer : layers) {
      if (layer.rows == 0) continue;
      input_bytes = std::max(input_bytes, layer.input_bytes / layer.rows);
      for (std::size_t i = 0; i < stages.size(); ++i) {
        const RecomputeProbe::Stage& of = layer.stages[i];
        stages[i].bytes = std::max(stages[i].bytes, of.bytes / layer.rows);
        stages[i].forward_s = std::min(stages[i].forward_s, of.forward_s / layer.rows);
        stages[i].backward_s = std::min(stages[i].backward_s, of.backward_s / layer.rows);
      }
    }
  }
  double input_bytes = 0;
  std::array<RecomputeProbe::Stage, RecomputeProbe::kStages> stages;
};

}  // namespace

RecomputeCost RecomputeCost::of(const std::vector<RecomputeProbe::Layer>& kept,
                                const std::vector<RecomputeProbe::Layer>& elementwise) {
  const PerRow all(kept), narrow(elementwise);
  std::array<double, RecomputeProbe::kStages> forward{}, again{};
  for (std::size_t i = 0; i < forward.size(); ++i) {
    forward[i] = std::min(all.stages[i].forward_s, narrow.stages[i].forward_s);
    again[i] = std::max(0.0, narrow.stages[i].backward_s - all.stages[i].backward_s);
  }
  RecomputeCost cost;
  // A layer counts its input and not its output, which is the next one's input and as large.
  cost.bytes = {all.stages[0].bytes + all.stages[1].bytes,
                narrow.stages[0].bytes + narrow.stages[1].bytes,
                all.input_bytes + narrow.stages[0].bytes, all.input_bytes};
  cost.seconds = {0, again[0] + again[1], again[0] + forward[1],
                  again[0] + forward[0] + forward[1]};
  return cost;
}

double StepMemory::peak(const std::vector<RecomputeCost>& by_layer, const LayerPolicies& policies,
                        double share) const {
  double highest = 0;
  for (const auto& [kept, moment] : moments) {
    const auto lasting = static_cast<double>(std::min(moment.lasting, moment.peak));
    double bytes = lasting + share * scale * (static_cast<double>(moment.peak) - lasting);
    for (const auto& [layer, inputs] : kept) {
      const auto i = static_cast<std::size_t>(layer);
      const auto& of = by_layer[i].bytes;
      bytes += share * rows * static_cast<double>(inputs) *
               (of[index_of(policies[i])] - of[index_of(Recompute::kFull)]);
    }
    highest = std::max(highest, bytes);
  }
  return held_bytes + highest;
}

namespace {

double seconds_of(const RecomputeCost& cost, Recompute policy) {
  return cost.seconds[index_of(policy)];
}

/// Saves memory in one layer at the least time a byte; false where everything is recomputed.
bool keep_less(const std::vector<RecomputeCost>& by_layer, LayerPolicies& policies) {
  std::optional<std::size_t> layer;
  Recompute best = Recompute::kOff;
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < policies.size(); ++i) {
    const RecomputeCost& cost = by_layer[i];
    for (const Recompute policy : kPolicies) {
      const double saved = cost.bytes[index_of(policies[i])] - cost.bytes[index_of(policy)];
      if (index_of(policy) <= index_of(policies[i]) || saved <= 0) continue;
      const double price = (seconds_of(cost, policy) - seconds_of(cost, policies[i])) / saved;
      if (price >= least) continue;
      least = price;
      layer = i;
      best = policy;
    }
  }
  if (layer) policies[*layer] = best;
  return layer.has_value();
}

}  // namespace

LayerPolicies choose_recompute(const std::vector<RecomputeCost>& by_layer,
                               const std::function<bool(const LayerPolicies&)>& fits) {
  LayerPolicies policies(by_layer.size(), Recompute::kOff);
  while (!fits(policies)) {
    if (!keep_less(by_layer, policies)) return LayerPolicies(by_layer.size(), Recompute::kFull);
  }
  // Some of it was of no use where dearer policies, or those of other ranks' layers, made the room.
  std::vector<std::size_t> dearest_first(by_layer.size());
  std::iota(dearest_first.rbegin(), dearest_first.rend(), std::size_t{0});
  const auto seconds = [&](std::size_t i) { return seconds_of(by_layer[i], policies[i]); };
  std::stable_sort(dearest_first.begin(), dearest_first.end(),
                   [&](std::size_t a, std::size_t b) { return seconds(a) > seconds(b); });
  for (const std::size_t i : dearest_first) {
    const Recompute before = policies[i];
    std::array cheaper = kPolicies;
    std::stable_sort(cheaper.begin(), cheaper.end(), [&](Recompute a, Recompute b) {
      return seconds_of(by_layer[i], a) < seconds_of(by_layer[i], b);
    });
    for (const Recompute policy : cheaper) {
      policies[i] = policy;
      if (policy == before || fits(policies)) break;
    }
  }
  return policies;
}

std::string describe(const LayerPolicies& policies) {
  std::vector<std::string> parts;
  for (const Recompute policy : kPolicies) {
    const auto count = std::count(policies.begin(), policies.end(), policy);
    if (count == 0) continue;
    const std::string_view name = to_string(policy);
    if (count == static_cast<std::ptrdiff_t>(policies.size())) return std::string(name);
    const char* unit = !parts.empty() ? "" : count == 1 ? " layer" : " layers";
    parts.push_back(fmt::format("{} in {}{}", name, count, unit));
  }
  return text::join(parts, ", ");
}

}  // namespace heddle::train
