#pragma once

#include <span>

#include "device/sim/operators/arguments.h"

namespace heddle::device::sim {

std::span<const FusedOperator> attention_operators();
std::span<const FusedOperator> elementwise_operators();
std::span<const FusedOperator> moe_operators();
std::span<const FusedOperator> gated_delta_rule_operators();

}  // namespace heddle::device::sim
