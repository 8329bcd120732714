#pragma once

#include <filesystem>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace heddle::cli {

/// Where a command's results go, and how it was called.
struct Session {
  std::ostream& out;  ///< results only; messages go through heddle::log
  bool out_has_color = false;
  int out_width = 0;              ///< columns of the terminal, 0 without one
  std::string command_line = {};  ///< as typed, for reports
};

/// Work of a parsed command line; returns the exit status. Throws Error for everything else.
using Action = std::function<int(const Session&)>;

// One function per subcommand. Each declares its options and, when the subcommand is the one that
// was typed, puts what must be done into `action`.
void add_init_command(CLI::App& app, Action& action);
/// sft and all that are sft with settings of their own.
void add_training_commands(CLI::App& app, Action& action);
void add_generate_command(CLI::App& app, Action& action);
void add_chat_command(CLI::App& app, Action& action);
void add_score_command(CLI::App& app, Action& action);
void add_export_command(CLI::App& app, Action& action);
void add_tokenize_command(CLI::App& app, Action& action);
void add_task_command(CLI::App& app, Action& action);
void add_config_command(CLI::App& app, Action& action);
void add_completion_command(CLI::App& app, Action& action);
void add_doctor_command(CLI::App& app, Action& action);
void add_report_command(CLI::App& app, Action& action);
void add_bench_command(CLI::App& app, Action& action);
void add_launch_command(CLI::App& app, Action& action);
void add_serve_command(CLI::App& app, Action& action);

/// Where `heddle launch` puts the ranks' messages unless it is told.
inline constexpr const char* kLaunchLogDirectory = "heddle-logs";

/// Names of the commands of add_training_commands().
std::vector<std::string> training_command_names();
bool is_training_command(const std::string& name);
/// Commands that several ranks run together: the training commands and some others.
std::vector<std::string> launched_command_names();
/// Overrides that a training command makes before those of the user.
std::vector<std::string> settings_of_training(const std::string& name);

/// FILE and key=value arguments in any number. The first is the file, unless it is an override.
struct ConfigArguments {
  std::filesystem::path file;  ///< empty: overrides only
  std::vector<std::string> overrides;
};
/// Throws ConfigError for a second file.
ConfigArguments split_config_arguments(const std::vector<std::string>& arguments);

}  // namespace heddle::cli
