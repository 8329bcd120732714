#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include "base/errors.h"
#include "base/output_file.h"
#include "base/quote.h"
#include "base/text.h"
#include "cli/command.h"
#include "cli/option_checks.h"
#include "reward/environment.h"

namespace heddle::cli {
namespace {

struct TaskOptions {
  std::string name;
  std::vector<std::string> parameters;
  std::uint64_t rows = 1000, first = 0, seed = 0;
  std::string output = "-";
};

/// Numbers, truth values and texts in quotes as JSON has them, all else as text: letters=abc,
/// terms=3, partial=true.
reward::Json parameters_of(const std::vector<std::string>& words) {
  reward::Json parameters = reward::Json::object();
  for (const std::string& word : words) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos || equals == 0)
      throw_error<ConfigError>("{}: expected parameter=value, such as largest=9",
                               text::shown(word));
    const std::string name = word.substr(0, equals), value = word.substr(equals + 1);
    reward::Json parsed = reward::Json::parse(value, nullptr, /*allow_exceptions=*/false);
    const bool is_value = parsed.is_primitive() && !parsed.is_null() && !parsed.is_discarded();
    parameters[name] = is_value ? std::move(parsed) : reward::Json(value);
  }
  return parameters;
}

int run(const TaskOptions& options, const Session& session) {
  const auto task =
      reward::make_task(options.name, parameters_of(options.parameters), "heddle task");
  const bool is_shown = options.output == "-";
  std::unique_ptr<files::OutputFile> file;
  if (!is_shown) file = std::make_unique<files::OutputFile>(options.output);
  for (std::uint64_t i = 0; i < options.rows; ++i) {
    const reward::Row row = task->row(options.seed, options.first + i);
    reward::Json object = {{"prompt", row.prompt}, {"answer", row.truth}};
    if (!row.meta.is_null()) object["meta"] = row.meta;
    const std::string line = object.dump() + "\n";
    if (is_shown) {
      session.out << line;
    } else {
      file->write(line);
    }
  }
  if (file) file->commit();
  return 0;
}

}  // namespace

void add_task_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<TaskOptions>();
  CLI::App* command = app.add_subcommand("task", "Make rows of a task that needs no data, for rl");
  command->add_option("name", options->name, text::join(reward::task_names(), ", "))
      ->required()
      ->type_name("NAME");
  command->add_option("parameters", options->parameters, "Parameters of the task")
      ->type_name("[parameter=value ...]");
  command->add_option("--rows", options->rows, "How many rows")
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--first", options->first, "The first row's number, for rows that others lack")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Rows of another seed are others")
      ->check(seed_of_64_bits())
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--output", options->output, "Where the rows go; -: standard output")
      ->type_name("FILE")
      ->capture_default_str();
  command->footer(
      "A row is a JSON object with prompt and answer, and where the judge needs more, meta.\n"
      "docs/rewards.md lists the tasks and their parameters.\n"
      "\n"
      "Examples:\n"
      "  heddle task arithmetic largest=9 --rows 500 --output sums.jsonl\n"
      "  heddle rl model.path=MODEL data.train=sums.jsonl train.output_dir=runs/sums\n"
      "            rl.reward.verifiers.arithmetic=1");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
