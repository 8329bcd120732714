#pragma once

#include <string>

namespace CLI {
class App;
}

namespace heddle::cli {

/// A script for bash, zsh or fish that completes commands, options, files and configuration keys.
/// Throws ConfigError for another shell.
std::string completion_script(const CLI::App& app, const std::string& shell);

}  // namespace heddle::cli
