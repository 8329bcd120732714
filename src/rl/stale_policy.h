#pragma once

#include "base/named_enum.h"

namespace heddle::rl {

/// For groups that would be too old after the next publication: the trainer waits for them, or they
/// are aborted and their prompts issued again.
enum class StalePolicy { kWait, kDrop };
constexpr auto names_of(StalePolicy) { return spelled("wait", "drop"); }

}  // namespace heddle::rl
