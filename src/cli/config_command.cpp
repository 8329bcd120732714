#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <ostream>

#include "assembly/from_config.h"
#include "base/errors.h"
#include "base/log.h"
#include "base/metrics.h"
#include "cli/command.h"
#include "config/config.h"
#include "config/objective.h"
#include "rl/reward_options.h"
#include "train/adapter_start.h"

namespace heddle::cli {
namespace {

struct ConfigOptions {
  bool is_reference = false, lists_metrics = false;
  bool is_print = false;
  bool is_markdown = false;
  bool is_json = false;
  std::vector<std::string> arguments;
};

int run_config(const ConfigOptions& options, const Session& session) {
  if (options.lists_metrics) {
    session.out << metrics_document();
    return 0;
  }
  if (options.is_reference) {
    session.out << (options.is_markdown ? config::reference_markdown() : config::reference_yaml());
    return 0;
  }
  const ConfigArguments given = split_config_arguments(options.arguments);
  // Without a file there is nothing to be complete: the defaults, with what the overrides say.
  const auto completeness =
      given.file.empty() ? config::Completeness::kPartial : config::Completeness::kComplete;
  config::RunConfig run =
      config::load(given.file, given.overrides, completeness, assembly::usual_device());
  // A folder that is not here, or a name of the Hub, is for the run to find.
  if (std::filesystem::is_directory(run.adapter.path)) train::take_adapter_settings(run);
  if (config::objective_of(run) == config::Objective::kPolicy) rl::check_rewards(run);
  for (const std::string& unused : config::unused_keys(run)) log::warning("{}", unused);
  session.out << (options.is_json ? config::dump_json(run) + "\n" : config::dump_yaml(run));
  return 0;
}

}  // namespace

void add_config_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<ConfigOptions>();
  CLI::App* command =
      app.add_subcommand("config", "Show all configuration keys, or check and print a run's");
  command->add_flag("--reference", options->is_reference,
                    "Every key with default, type and meaning");
  command->add_flag("--metrics", options->lists_metrics,
                    "Every figure of metrics.jsonl with unit and meaning");
  command->add_flag("--markdown", options->is_markdown, "The reference as Markdown tables");
  command->add_flag("--print", options->is_print,
                    "The configuration as a run would see it (also without this)");
  command->add_flag("--json", options->is_json, "Print as one JSON document");
  command
      ->add_option("arguments", options->arguments, "A configuration file and key=value overrides")
      ->type_name("[FILE] [key=value ...]");
  command->footer(
      "Examples:\n"
      "  heddle config --reference > run.yaml\n"
      "  heddle config --print run.yaml optim.lr=3e-4 'data.train=[a.jsonl, b.jsonl]'\n"
      "\n"
      "A mistake gives exit status 2 and one line that names file, line and key.");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run_config(*options, session); };
  });
}

}  // namespace heddle::cli
