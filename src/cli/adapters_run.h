#pragma once

#include <string>
#include <vector>

#include "cli/command.h"
#include "config/adapters.h"

namespace heddle::cli {

/// Trains the adapters of a file's `adapters:` in one run. Writes train.output_dir: NAME/ with the
/// metrics of each, checkpoints/, final/NAME. `begun`: the command line, to say how it goes on.
int run_adapters(const std::vector<config::AdapterRun>& runs, const std::vector<std::string>& begun,
                 const Session& session);

}  // namespace heddle::cli
