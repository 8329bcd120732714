#pragma once

#include <span>
#include <string>

#include "cli/command.h"

namespace heddle::cli {

/// Declares the options of the program and all its subcommands; completion and tests walk this
/// tree.
void add_commands(CLI::App& app, Action& action);

/// Parses the command line (without the program's name), runs the command and turns every exception
/// into one readable line on the standard error (with --debug: its type and all it says). Returns
/// the exit status: 0 success, 2 the user's mistake, 1 anything else.
int run(std::span<const std::string> arguments, const Session& session);

/// "heddle sft run.yaml 'data.train=[a, b]'": quoted so that a shell reads it back.
std::string quote_command(std::span<const std::string> arguments);

}  // namespace heddle::cli
