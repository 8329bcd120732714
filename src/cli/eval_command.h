#pragma once

#include "cli/command.h"

namespace heddle::cli {

/// `heddle eval`: metrics of a model's answers to rows.
void add_eval_command(CLI::App& app, Action& action);

}  // namespace heddle::cli
