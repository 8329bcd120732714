#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <ostream>

#include "assembly/from_config.h"
#include "base/log.h"
#include "cli/adapters_run.h"
#include "cli/application.h"
#include "cli/command.h"
#include "cli/continuation.h"
#include "cli/judged_steps.h"
#include "cli/names.h"
#include "cli/run_observer.h"
#include "cli/stop_request.h"
#include "comm/endpoint.h"
#include "comm/launch_environment.h"
#include "comm/refusal.h"
#include "comm/world.h"
#include "config/config.h"
#include "config/objective.h"
#include "rl/reward_options.h"
#include "rl/rollout_job.h"
#include "rl/rollouts.h"
#include "rl/steps.h"
#include "rollout/answers.h"
#include "train/adapter_start.h"
#include "train/class_labels.h"
#include "train/setup.h"
#include "train/trainer.h"

namespace heddle::cli {
namespace {

/// Rank 0 shows and records the run; the others train, and generate with it.
train::Summary train_as_rank(const std::string& name, const config::RunConfig& config,
                             const StopRequest& stop, const std::shared_ptr<comm::World>& world,
                             const Session& session) {
  const bool generates = config::objective_of(config) == config::Objective::kPolicy;
  const train::MakeSubject make_subject = generates                    ? rl::subject
                                          : !config.eval.input.empty() ? judged_subject
                                                                       : train::dataset_subject;
  return comm::announcing_failure(world.get(), [&] {
    const auto run = [&](auto& observer) {
      train::Trainer trainer(config, observer, stop.flag(), world, make_subject);
      if (!config.log.sample_prompts.empty()) {
        observer.sample_with([&] {
          return rollout::answer_prompts(
              trainer.setup().placed, trainer.setup().tokenizer, config.log.sample_prompts,
              config.log.sample_tokens,
              train::dataset_options(config, train::DataPart::kTrain).rendering);
        });
      }
      return trainer.run();
    };
    if (world && world->rank() > 0) {
      QuietObserver observer;
      return run(observer);
    }
    RunObserver observer(name, config, session);
    try {
      return run(observer);
    } catch (const std::exception& error) {
      observer.on_failure(error.what());
      throw;
    }
  });
}

/// The first rank's answer to the first signal: with rl a step may take minutes.
const char* notice_of_stop(const config::RunConfig& config) {
  const auto environment = comm::read_launch_environment();
  if (environment && environment->rank > 0) return nullptr;
  if (assembly::only_generates(config)) return nullptr;
  return "\nstopping: this step is finished and saved first; a second signal ends the run at once, "
         "and it goes on from its last checkpoint\n";
}

int run(const std::string& name, const std::vector<std::string>& arguments,
        std::vector<std::string> defaults, const Session& session) {
  const ConfigArguments split = split_config_arguments(arguments);
  // The command's own settings come first, so that the user's overrides win.
  defaults.insert(defaults.end(), split.overrides.begin(), split.overrides.end());
  std::vector<std::string> begun = {name};
  begun.insert(begun.end(), arguments.begin(), arguments.end());
  if (name == "sft") {
    const std::vector<config::AdapterRun> adapters = comm::before_joining([&] {
      auto runs = config::load_adapters(split.file, defaults, assembly::usual_device());
      for (config::AdapterRun& run : runs) {
        resolve_names(run.config);
        const std::string tokenizer = run.config.model.tokenizer;  // one for all of them
        train::take_adapter_settings(run.config);
        run.config.model.tokenizer = tokenizer;
      }
      return runs;
    });
    if (!adapters.empty()) return run_adapters(adapters, begun, session);
  }
  const config::RunConfig config = comm::before_joining([&] {
    config::RunConfig read = config::load(split.file, defaults, config::Completeness::kComplete,
                                          assembly::usual_device());
    if (read.rl.has_two_jobs()) comm::parse_endpoint(read.sync.listen, "sync.listen");
    resolve_names(read);
    train::take_adapter_settings(read);
    train::find_class_labels(read);
    if (config::objective_of(read) == config::Objective::kPolicy) rl::check_rewards(read);
    return read;
  });
  log::set_level(config.log.level);
  for (const std::string& sentence : config::unused_keys(config)) log::warning("{}", sentence);
  StopRequest stop(notice_of_stop(config));
  const char* const log_file = std::getenv(comm::kLogVariable);
  if (log_file != nullptr) log::add_file(log_file);
  const std::shared_ptr<comm::World> world = assembly::join_world(config);
  if (world && world->part() == assembly::kRollouts) {
    comm::announcing_failure(world.get(),
                             [&] { rl::run_rollouts(config, world, rl::rollout_data(config)); });
    world->leave();
    return 0;
  }
  if (assembly::only_generates(config)) {
    comm::announcing_failure(world.get(), [&] { rl::run_rollout_job(config, world, stop.flag()); });
    if (world) world->leave();
    return 0;
  }
  const train::Summary summary = train_as_rank(name, config, stop, world, session);
  if (world) world->leave();
  if (!summary.stopped || (world && world->rank() > 0)) return 0;
  session.out << "stopped after step " << summary.steps << "; "
              << continuation(begun, world ? &world->environment() : nullptr,
                              log_file == nullptr ? "" : log_file)
              << "\n";
  return 0;
}

/// A command that trains: a run with some settings of its own.
struct TrainingCommand {
  const char* name;
  const char* about;
  const char* footer;
  std::vector<std::string> settings;
};

const std::vector<TrainingCommand>& training_commands() {
  static const std::vector<TrainingCommand> commands = {
      {"sft",
       "Fine-tune a model on conversations, completions or text",
       "Writes train.output_dir: metrics.jsonl, report.html, TensorBoard events, checkpoints/, and "
       "at the end\n"
       "final/, a Hugging Face model directory (train.method full) or a PEFT adapter directory "
       "(lora).\n"
       "The same command continues an interrupted run. Ctrl-C saves and stops; a second one stops "
       "at once.\n"
       "All keys: heddle config --reference\n"
       "\n"
       "Example:\n"
       "  heddle sft run.yaml model.path=models/base data.train=chat.jsonl train.method=lora",
       {}},
      {"pt",
       "Train on plain text (continued pretraining, or from `heddle init`)",
       "As sft, with every token of a row in the loss. Rows are JSONL with a `text` field.\n"
       "\n"
       "Example:\n"
       "  heddle init --preset small-10m --tokenizer examples/tokenizer-4k --output models/small\n"
       "  heddle pt model.path=models/small data.train=text.jsonl optim.lr=1e-3 "
       "train.max_steps=500",
       {"data.loss_on=all"}},
      {"dpo",
       "Tune a model on preferences: of two answers the chosen one gets likelier",
       "As sft. Rows hold `prompt`, `chosen` and `rejected` (texts or lists of messages), `chosen` "
       "and\n"
       "`rejected` as whole conversations, or `prompt_ids`, `chosen_ids` and `rejected_ids`. "
       "dpo.loss\n"
       "chooses between DPO (sigmoid, ipo, hinge), ORPO and SimPO.\n"
       "\n"
       "Example:\n"
       "  heddle dpo run.yaml data.train=preferences.jsonl train.method=lora optim.lr=5e-6 "
       "dpo.beta=0.1",
       {"train.objective=dpo"}},
      {"reward",
       "Train a reward model on preferences: it gives a text one score",
       "As sft, with rows as for dpo. `heddle score --head classify` scores texts with the "
       "result.\n"
       "\n"
       "Example:\n"
       "  heddle reward run.yaml data.train=preferences.jsonl optim.lr=1e-5",
       {"train.objective=reward", "model.head=classify", "model.num_labels=1"}},
      {"rl",
       "Teach a model by rewards for its own answers",
       "As sft. Rows hold `prompt` (a text or a list of messages) or `messages`, and `answer`, "
       "which "
       "rewards\n"
       "compare completions with. metrics.jsonl has reward_mean, length_mean, entropy and more, "
       "groups.jsonl\n"
       "samples of what the model wrote.\n"
       "\n"
       "Example:\n"
       "  heddle rl run.yaml data.train=prompts.jsonl rl.reward.verifiers.exact=1 "
       "rollout.max_new_tokens=256",
       {"train.objective=policy"}},
  };
  return commands;
}

void add(CLI::App& app, Action& action, const TrainingCommand& training) {
  auto arguments = std::make_shared<std::vector<std::string>>();
  CLI::App* command = app.add_subcommand(training.name, training.about);
  command->add_option("config", *arguments, "A YAML file, and overrides such as optim.lr=3e-4")
      ->required()
      ->type_name("CONFIG.yaml [key=value ...]");
  command->footer(training.footer);
  command->callback([arguments, &training, &action] {
    action = [arguments, &training](const Session& session) {
      return run(training.name, *arguments, training.settings, session);
    };
  });
}

}  // namespace

void add_training_commands(CLI::App& app, Action& action) {
  for (const TrainingCommand& command : training_commands()) add(app, action, command);
}

std::vector<std::string> training_command_names() {
  std::vector<std::string> names;
  for (const TrainingCommand& command : training_commands()) names.emplace_back(command.name);
  return names;
}

bool is_training_command(const std::string& name) {
  const std::vector<std::string> names = training_command_names();
  return std::ranges::find(names, name) != names.end();
}

std::vector<std::string> settings_of_training(const std::string& name) {
  for (const TrainingCommand& command : training_commands()) {
    if (command.name == name) return command.settings;
  }
  return {};
}

}  // namespace heddle::cli
