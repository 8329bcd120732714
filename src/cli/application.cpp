#include "cli/application.h"

#include <cxxabi.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <ostream>
#include <system_error>
#include <typeinfo>

#include "base/errors.h"
#include "base/files.h"
#include "base/log.h"
#include "base/quote.h"
#include "base/text.h"
#include "cli/eval_command.h"
#include "cli/help_formatter.h"
#include "cli/version.h"
#include "comm/launch_environment.h"
#include "config/config.h"
#include "device/npu_error.h"
#include "models/registry.h"

namespace heddle::cli {
namespace {

constexpr std::size_t kLongestMessage = 4000;

std::string type_name(const std::exception& e) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(typeid(e).name(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? name.get() : typeid(e).name();
}

/// libtorch puts a stack trace below the first line of its messages; only --debug shows it.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// Whether the user gave a name that no file can have, wherever the system was asked for it.
bool is_name_too_long(const std::exception& e) {
  const auto* error = dynamic_cast<const std::filesystem::filesystem_error*>(&e);
  return error != nullptr && error->code() == std::errc::filename_too_long;
}

int report(const std::exception& e, bool is_debug) {
  const auto* ours = dynamic_cast<const Error*>(&e);
  const bool is_foreign = ours == nullptr;
  std::string message = e.what();
  if (dynamic_cast<const std::bad_alloc*>(&e) != nullptr) message = "out of memory";
  if (is_foreign) {
    if (const auto npu = device::explain_npu_error(message)) message = *npu;
  }
  if (is_foreign && !is_debug) message = first_line(message);
  if (is_debug) message = fmt::format("{}\n  type: {}", message, type_name(e));
  if (const char* file = std::getenv(comm::kLogVariable); file != nullptr && !is_debug) {
    // The launcher shows one message of all ranks, and takes it from their logs.
    const std::string line = "error: " + text::shown(message, kLongestMessage) + "\n";
    const int descriptor = files::open_to_append(file);
    if (write(descriptor, line.data(), line.size()) < 0) log::error("{}", message);
    close(descriptor);
  } else {
    log::error("{}", message);
  }
  if (is_name_too_long(e)) return 2;
  return is_foreign ? 1 : ours->exit_status();
}

const CLI::App& selected(const CLI::App& app) {
  const auto subcommands = app.get_subcommands();
  return subcommands.empty() ? app : selected(*subcommands.front());
}

/// Words that this command would have accepted: options with their dashes, or the subcommands.
std::vector<std::string> accepted(const CLI::App& command, bool wants_option) {
  std::vector<std::string> names;
  if (!wants_option) {
    for (const CLI::App* sub : command.get_subcommands({})) names.push_back(sub->get_name());
    return names;
  }
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

/// The option that was meant by another program's longer name for it: --nproc_per_node,
/// --node_rank.
std::string shorter_option(std::string word, const std::vector<std::string>& options) {
  std::replace(word.begin(), word.end(), '_', '-');
  std::string longest;
  for (const std::string& option : options) {
    const bool is_word = word == option || word.starts_with(option + "-");
    if (is_word && option.size() > longest.size()) longest = option;
  }
  return longest;
}

/// This program's name for a command of other programs; "" if none is known.
std::string own_command_for(const std::string& name) {
  static const std::map<std::string, std::string> kOwn = {
      {"train", "heddle sft (conversations, completions) or heddle pt (plain text)"},
      {"finetune", "heddle sft"},
      {"infer", "heddle generate"},
      {"inference", "heddle generate"},
      {"evaluate", "heddle eval MODEL_DIR --input rows.jsonl"},
      {"merge", "heddle export MODEL_DIR --adapter DIR --output DIR"},
      {"merge-lora", "heddle export MODEL_DIR --adapter DIR --output DIR"},
      {"preprocess", "heddle tokenize, to look; sft and pt tokenize by themselves"},
      {"torchrun", "heddle launch"},
      {"rm", "heddle reward"},
      {"rlhf", "heddle dpo, heddle reward or heddle rl"},
      {"ppo", "heddle rl"},
      {"grpo", "heddle rl"},
      {"ipo", "heddle dpo with dpo.loss=ipo"},
      {"orpo", "heddle dpo with dpo.loss=orpo"},
      {"simpo", "heddle dpo with dpo.loss=simpo"},
  };
  if (name == "kto") return "not built yet; preference tuning is heddle dpo";
  const auto found = kOwn.find(name);
  return found == kOwn.end() ? "" : found->second;
}

/// Suggests the key for an option of a command that takes key=value; "" if nothing fits.
std::string as_key(const std::string& word, const CLI::App& command) {
  const std::vector<const CLI::Option*> options = command.get_options();
  const bool takes_keys = std::ranges::any_of(options, [](const CLI::Option* option) {
    return option->get_positional() &&
           option->get_type_name().find("key=value") != std::string::npos;
  });
  if (!takes_keys) return "";
  const std::string name = word.substr(word.find_first_not_of('-'));
  return fmt::format("settings are key=value without dashes: {}{}", name,
                     name.find('=') == std::string::npos ? "=VALUE" : "");
}

/// An option that may be given several times takes one value each time: what follows is an
/// argument.
void take_one_each(CLI::App& command) {
  for (CLI::Option* option : command.get_options()) {
    const bool is_repeatable = !option->get_positional() && option->get_items_expected_max() > 1;
    if (is_repeatable) option->allow_extra_args(false);
  }
  for (CLI::App* each : command.get_subcommands({})) take_one_each(*each);
}

/// The words that call a command, from the program's name on.
std::string call_of(const CLI::App& command, const CLI::App& app) {
  if (&command == &app) return "heddle";
  return call_of(*command.get_parent(), app) + " " + command.get_name();
}

/// One line for a command line that does not parse.
std::string explain(const CLI::App& app, const CLI::ParseError& e) {
  const CLI::App& command = selected(app);
  const std::string call = call_of(command, app);
  std::string message = e.what();
  if (dynamic_cast<const CLI::ExtrasError*>(&e) != nullptr) {
    const std::vector<std::string> left = app.remaining(true);
    const std::string word = left.empty() ? "" : left.front();
    const bool is_option = word.starts_with("-");
    const bool is_command = &command == &app && !is_option;
    const char* kind = is_option ? "option" : is_command ? "command" : "argument";
    message = fmt::format("unknown {} '{}'", kind, word);
    const std::string name = word.substr(0, word.find('='));
    std::string near = is_option ? shorter_option(name, accepted(command, true)) : "";
    if (near.empty()) near = text::nearest(name, accepted(command, is_option));
    const std::string own = is_command                  ? own_command_for(word)
                            : is_option && near.empty() ? as_key(word, command)
                                                        : "";
    if (!own.empty()) {
      message += fmt::format(" ({})", own);
    } else if (!near.empty()) {
      message += fmt::format(" (did you mean '{}'?)", near);
    }
  }
  if (message == "A subcommand is required") {
    std::vector<std::string> names;
    for (const CLI::App* each : command.get_subcommands({})) names.push_back(each->get_name());
    message = fmt::format("expected one of {}", fmt::join(names, ", "));
  }
  if (message == "config is required")
    message = "expected a YAML file, or settings such as model.path=DIR data.train=FILE";
  return fmt::format("{}; see {} --help", first_line(message), call);
}

int parse_and_run(std::span<const std::string> arguments, const Session& session) {
  CLI::App app("Post-trains language models: " + models::family_titles() + ".", "heddle");
  Action action;
  add_commands(app, action);
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // as CLI11 wants them
  try {
    app.parse(std::move(reversed));
  } catch (const CLI::CallForHelp&) {
    session.out << app.help();
    return 0;
  } catch (const CLI::ParseError& e) {
    throw ConfigError(explain(app, e));
  }
  if (!action) {
    session.out << app.help();
    return 0;
  }
  return action(session);
}

}  // namespace

void add_commands(CLI::App& app, Action& action) {
  app.require_subcommand(0, 1);
  app.fallthrough();
  app.set_help_flag("-h,--help", "Show this help");
  app.formatter(std::make_shared<HelpFormatter>());
  app.add_flag_callback(
      "--debug", [] {}, "Show the type and the whole text of an error");
  app.add_option_function<std::uint64_t>(
         "--file-limits", files::multiply_limits,
         "Read configurations, tokenizers and templates N times as large")
      ->type_name("N")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1024}));
  app.add_flag_callback(
      "--version",
      [&action] {
        action = [](const Session& session) {
          session.out << version_line() << "\n";
          return 0;
        };
      },
      "Show the version");
  app.footer(
      "Examples:\n"
      "  heddle config --reference > run.yaml    write a commented configuration\n"
      "  heddle doctor                           see what this machine offers\n"
      "  heddle COMMAND --help                   see what a command takes");

  add_init_command(app, action);
  add_training_commands(app, action);
  add_launch_command(app, action);
  add_generate_command(app, action);
  add_serve_command(app, action);
  add_chat_command(app, action);
  add_score_command(app, action);
  add_eval_command(app, action);
  add_export_command(app, action);
  add_tokenize_command(app, action);
  add_task_command(app, action);
  add_config_command(app, action);
  add_report_command(app, action);
  add_bench_command(app, action);
  add_doctor_command(app, action);
  add_completion_command(app, action);
  take_one_each(app);
}

int run(std::span<const std::string> arguments, const Session& session) {
  const bool is_debug = std::ranges::find(arguments, "--debug") != arguments.end();
  try {
    if (const char* file = std::getenv(comm::kLogVariable)) log::add_file(file);
    const int status = parse_and_run(arguments, session);
    session.out.flush();
    if (!session.out) throw FileError("cannot write to the standard output");
    return status;
  } catch (const std::exception& e) {
    return report(e, is_debug);
  }
}

std::string quote_command(std::span<const std::string> arguments) {
  std::string out = "heddle";
  for (const std::string& given : arguments) {
    const std::string argument = config::without_secret(given);
    constexpr std::string_view kPlain = "_-./:=+,@%^";
    const bool is_plain = !argument.empty() && std::ranges::all_of(argument, [&](unsigned char c) {
      return std::isalnum(c) || kPlain.find(static_cast<char>(c)) != std::string_view::npos;
    });
    std::string quoted = argument;
    if (!is_plain) {
      quoted = "'";
      for (const char c : argument) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
      quoted += "'";
    }
    out += " " + quoted;
  }
  return out;
}

ConfigArguments split_config_arguments(const std::vector<std::string>& arguments) {
  ConfigArguments split;
  for (const std::string& argument : arguments) {
    const bool is_override = argument.find('=') != std::string::npos;
    const bool is_first = &argument == &arguments.front();
    if (is_override && !(is_first && std::filesystem::exists(argument))) {
      split.overrides.push_back(argument);
    } else if (split.file.empty()) {
      split.file = argument;
    } else {
      throw_error<ConfigError>(
          "command line: expected one configuration file and key=value, found a second file '{}'",
          argument);
    }
  }
  return split;
}

}  // namespace heddle::cli
