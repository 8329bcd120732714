#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "parallel/recompute.h"

namespace heddle::train {

using LayerPolicies = std::vector<parallel::Recompute>;  ///< By layer of the model.

/// Memory that one layer keeps for its backward and time of running again, by policy and for one
/// row of hidden states.
struct RecomputeCost {
  std::array<double, parallel::kRecomputePolicies> bytes{}, seconds{};

  /// Cost of the layers of one kind, of which at least one must have rows: the most bytes and the
  /// least time of each part, as delays only add to it. `kept` and `elementwise` are of the two
  /// kinds of graphs that parallel::RecomputeProbe measures.
  static RecomputeCost of(const std::vector<parallel::RecomputeProbe::Layer>& kept,
                          const std::vector<parallel::RecomputeProbe::Layer>& elementwise);
};

/// Memory of one rank in a step, as measured with everything recomputed.
struct StepMemory {
  double held_bytes = 0;  ///< Before the step: weights, optimizer.
  double rows = 0;        ///< Rows of hidden states, in the largest micro-batch of any step.
  double scale = 1;       ///< How many times those of the measured one.
  std::map<parallel::RecomputeProbe::Kept, parallel::RecomputeProbe::Moment> moments;

  /// Most bytes that a step with these policies holds at a time. `share`: of the tokens of the
  /// largest micro-batch.
  double peak(const std::vector<RecomputeCost>& by_layer, const LayerPolicies& policies,
              double share = 1) const;
};

/// The policies that take the least time among those that fit: everything kept, or where that does
/// not fit, with what saves memory at the least time a byte first, the same in the first layers
/// before the next. `fits` is asked on every rank with the same policies in the same order, and
/// must answer all ranks alike. Where nothing fits everything is recomputed.
LayerPolicies choose_recompute(const std::vector<RecomputeCost>& by_layer,
                               const std::function<bool(const LayerPolicies&)>& fits);

/// "off in 12 layers, elementwise in 20", or "off" if all are alike.
std::string describe(const LayerPolicies& policies);

}  // namespace heddle::train
