#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "config/run_config.h"

namespace heddle::config {

/// Tells of a key that has no effect, and why, if the run is given it.
using NoteUnused = std::function<void(const std::string& key, std::string_view reason)>;

/// Keys of `heddle rl` in other runs, and those that it does without.
void note_policy_keys(const RunConfig& config, const NoteUnused& note);

}  // namespace heddle::config
