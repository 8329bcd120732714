#pragma once

#include "base/named_enum.h"

namespace heddle::config {

/// Course of a learning rate over a run, see train/schedule.h.
enum class Schedule { kConstant, kLinear, kCosine, kWsd };
constexpr auto names_of(Schedule) { return spelled("constant", "linear", "cosine", "wsd"); }

/// Form of the final decay of Schedule::kWsd.
enum class DecayType { kLinear, kCosine, kOneMinusSqrt };
constexpr auto names_of(DecayType) { return spelled("linear", "cosine", "1-sqrt"); }

}  // namespace heddle::config
