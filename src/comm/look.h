#pragma once

#include "comm/store.h"

namespace heddle::comm {

/// How often a waiting rank looks whether another one has failed.
inline constexpr Seconds kLookForFailures{0.5};

}  // namespace heddle::comm
