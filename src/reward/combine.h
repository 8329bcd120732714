#pragma once

#include "base/named_enum.h"

namespace heddle::reward {

/// How the parts of a reward make one number: sum of weight x part, or product of part ^ weight.
enum class Combine { kSum, kProduct };
constexpr auto names_of(Combine) { return spelled("sum", "product"); }

}  // namespace heddle::reward
