#pragma once

#include <vector>

#include "cli/command.h"

namespace heddle::cli {

/// Folder of `heddle serve` in the working directory, unless another is named.
constexpr const char* kServeDataDirectory = "heddle-server";

/// Commands of `heddle serve` on the data directory of a server: keys, usage, audit.
std::vector<const CLI::App*> add_serve_data_commands(CLI::App& serve_command, Action& action);

}  // namespace heddle::cli
