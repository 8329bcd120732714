#pragma once

#include "base/named_enum.h"

namespace heddle::ops {

/// How the ranks along cp share what mixes tokens.
enum class ContextMethod {
  kState,    ///< Tokens stay where they are; states, keys and values travel.
  kUlysses,  ///< Tokens travel: each rank mixes all of them for some heads.
};
constexpr auto names_of(ContextMethod) { return spelled("state", "ulysses"); }

}  // namespace heddle::ops
