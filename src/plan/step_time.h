#pragma once

#include <utility>
#include <vector>

#include "plan/hardware.h"
#include "plan/step_on_ranks.h"

namespace heddle::plan {

/// Where the time of a step goes on the rank of the pipeline that has most to do, seconds.
struct StepTime {
  double products = 0, attention = 0, delta_rule = 0, elementwise = 0;
  double optimizer = 0;  ///< With the gradient norm.
  double idle = 0;       ///< Between kernels, and once a step.
  /// Time that each of traffic_of() adds because nothing hides it.
  std::vector<double> exposed;
  double waiting = 0;  ///< For other stages of the pipeline.
  double total = 0;

  double communication() const;
};

/// Time of a step of full rows, by counts of FLOPs and bytes over the rates of the hardware.
StepTime time_of(const StepOnRanks& layout, const std::vector<Traffic>& traffic,
                 const Hardware& hardware);

}  // namespace heddle::plan
