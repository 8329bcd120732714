#include "cli/eval_command.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/output_file.h"
#include "cli/answer_evaluation.h"
#include "cli/model_arguments.h"
#include "cli/option_checks.h"
#include "cli/sampling_defaults.h"
#include "cli/template_arguments.h"
#include "data/json/json_text.h"

namespace heddle::cli {
namespace {

struct EvalOptions {
  ModelArguments model;
  AnswerEvaluationOptions judged;
  std::string output;
  std::vector<std::string> template_arguments;
  SamplingArguments sampling;
  bool json = false;
};

/// Writes the rows with what was found out about them.
void write(const std::vector<EvalCase>& cases, const std::string& file) {
  if (file.empty()) return;
  files::OutputFile output(file);
  for (const EvalCase& one : cases) output.write(data::json_text::dump(one.value) + "\n");
  output.commit();
}

MetricTable evaluate(const EvalOptions& options, bool is_classifier) {
  assembly::ModelOnRanks model = load(
      options.model, is_classifier ? assembly::Head::kClassify : assembly::Head::kLanguageModel,
      is_classifier ? assembly::Purpose::kScore : assembly::Purpose::kGenerate);
  data::RenderOptions rendering;
  rendering.template_variables = template_variables(options.template_arguments);
  AnswerEvaluationOptions judged = options.judged;
  if (!is_classifier)
    judged.sampling = sampling_of(options.sampling, model.source->generation_config());
  AnswerEvaluation evaluation(judged, model, load_tokenizer(options.model, model), rendering,
                              is_classifier);
  MetricTable table = is_classifier ? evaluation.classify() : evaluation.run();
  write(evaluation.cases(), options.output);
  return table;
}

int run(EvalOptions options, const Session& session) {
  require_metrics(options.judged.metrics, "--metric");
  if (options.judged.max_new_tokens < 1)
    throw_error<ConfigError>("--max-new-tokens is {}: expected 1 or more",
                             options.judged.max_new_tokens);
  const bool is_classifier =
      head_name(options.model.directory, options.model.adapter, "") == "classify";
  if (is_classifier && !options.judged.metrics.empty()) {
    throw_error<ConfigError>("--metric: {} is a classifier: accuracy and f1_macro are its metrics",
                             options.model.directory);
  }
  const MetricTable table = evaluate(options, is_classifier);
  session.out << (options.json ? table.to_json() + "\n"
                               : table.to_text(session.out_has_color, session.out_width));
  return 0;
}

}  // namespace

void add_eval_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<EvalOptions>();
  options->sampling.temperature = 0;
  CLI::App* command = app.add_subcommand("eval", "Judge a model's answers to rows");
  add_model_arguments(*command, options->model);
  command
      ->add_option("--input", options->judged.rows.input,
                   "Rows with messages or a prompt, and the right answer")
      ->required()
      ->type_name("IN.jsonl");
  command
      ->add_option("--metric", options->judged.metrics,
                   "exact, numeric, math, contains, f1, likelihood, "
                   "perplexity, ... (repeatable)")
      ->type_name("NAME");
  command
      ->add_option("--answer", options->judged.rows.answer,
                   "Field of the right answer; default answer, else the row's "
                   "own last answer")
      ->type_name("FIELD");
  command->add_option("--group", options->judged.rows.group, "Field whose values get a line each")
      ->type_name("FIELD");
  command->add_option("--output", options->output, "The rows with outputs and metrics")
      ->type_name("OUT.jsonl");
  command->add_flag("--raw", options->judged.rows.raw,
                    "Take `prompt` as it is, without chat template");
  command->add_option("--max-new-tokens", options->judged.max_new_tokens, "At most so many")
      ->capture_default_str();
  command->add_option("--temperature", options->sampling.temperature, "0: the most likely token")
      ->capture_default_str();
  command->add_option("--seed", options->sampling.seed, "Of the sampling")
      ->check(seed_of_64_bits())
      ->capture_default_str();
  command->add_option("--stop", options->judged.stop, "End where this text begins (repeatable)")
      ->check(not_empty());
  command
      ->add_option("--max-sequences", options->judged.engine.max_sequences, "Generated at a time")
      ->capture_default_str();
  add_template_arguments(*command, options->template_arguments);
  command->add_flag("--json", options->json, "Print the metrics as one JSON document");
  add_kernel_argument(*command, options->model);
  command->footer(
      "likelihood: the row has `choices`, and its answer is one of them, its "
      "number from 0 or its "
      "letter.\n"
      "A classifier gets accuracy and f1_macro of the field `label`.\n"
      "\n"
      "Example:\n"
      "  heddle eval runs/chat/final --input test.jsonl --metric numeric "
      "--group kind");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
