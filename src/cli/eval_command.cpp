#include "cli/eval_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <ostream>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/output_file.h"
#include "base/quote.h"
#include "base/text.h"
#include "cli/eval_metrics.h"
#include "cli/eval_rows.h"
#include "cli/model_arguments.h"
#include "cli/sampling_defaults.h"
#include "cli/template_arguments.h"
#include "data/batch.h"
#include "data/json/json_text.h"
#include "reward/verifiers.h"
#include "rollout/answers.h"
#include "rollout/engine.h"
#include "train/scorer.h"

namespace heddle::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kF1 = "f1";
constexpr const char* kLikelihood = "likelihood";
constexpr const char* kPerplexity = "perplexity";
/// Tokens scored in one pass.
constexpr std::int64_t kBatchTokens = 8192;

struct EvalOptions {
  ModelArguments model;
  EvalRowOptions rows;
  std::string output;
  std::vector<std::string> metrics, template_arguments, stop;
  std::int64_t max_new_tokens = 256;
  SamplingArguments sampling;
  rollout::EngineOptions engine;
  bool json = false;
};

std::vector<std::string> metric_names() {
  std::vector<std::string> names = reward::verifier_names();
  for (const char* own : {kF1, kLikelihood, kPerplexity}) names.emplace_back(own);
  return names;
}

class Evaluation {
 public:
  Evaluation(const EvalOptions& options, bool is_classifier)
      : options_(options),
        model_(load(options.model,
                    is_classifier ? assembly::Head::kClassify : assembly::Head::kLanguageModel,
                    is_classifier ? assembly::Purpose::kScore : assembly::Purpose::kGenerate)),
        tokenizer_(data::Tokenizer::load(tokenizer_directory(options.model))),
        rows_(*tokenizer_, options.rows, template_variables(options.template_arguments),
              is_classifier) {
    cases_ = rows_.read();
  }

  MetricTable run() {
    std::vector<std::string> judged;
    for (const std::string& metric : metrics()) {
      if (metric == kLikelihood) {
        choose();
      } else if (metric == kPerplexity) {
        measure_perplexity();
      } else {
        judged.push_back(metric);
      }
    }
    if (!judged.empty()) generate_and_judge(judged);
    write();
    return std::move(table_);
  }

  MetricTable classify() {
    std::vector<std::pair<std::int64_t, std::int64_t>> predictions;
    std::vector<std::vector<std::int32_t>> rows;
    for (const EvalCase& one : cases_) rows.push_back(one.prompt);
    score(rows, [&](std::size_t i, const train::RowScore& scored) {
      const auto best = std::max_element(scored.outputs.begin(), scored.outputs.end());
      const std::int64_t prediction = best - scored.outputs.begin();
      cases_[i].value["prediction"] = prediction;
      predictions.emplace_back(prediction, cases_[i].label);
      table_.add(cases_[i].group, "accuracy", prediction == cases_[i].label ? 1 : 0);
    });
    table_.add("", "f1_macro", 0);
    table_.set("", "f1_macro", macro_f1(predictions));
    write();
    return std::move(table_);
  }

 private:
  /// The requested metric, or the one that the rows are made for.
  std::vector<std::string> metrics() const {
    if (!options_.metrics.empty()) return options_.metrics;
    if (!cases_.front().choices.empty()) return {kLikelihood};
    return {"exact", kF1};
  }

  /// Scores rows in passes of bounded size.
  template <class Use>
  void score(const std::vector<std::vector<std::int32_t>>& rows, Use use) {
    train::Scorer scorer(model_);
    std::size_t begin = 0;
    while (begin < rows.size()) {
      std::size_t end = begin;
      std::int64_t tokens = 0;
      do {
        tokens += std::ssize(rows[end]);
        ++end;
      } while (end < rows.size() && tokens + std::ssize(rows[end]) <= kBatchTokens);
      const auto scores =
          scorer.score(std::span(rows).subspan(begin, end - begin), {/*normalize=*/true, false});
      for (std::size_t i = begin; i < end; ++i) use(i, scores[i - begin]);
      begin = end;
    }
  }

  /// The likeliest choice after the prompt: by log-probability, and by
  /// that of one byte.
  void choose() {
    std::vector<std::vector<std::int32_t>> rows;
    std::vector<std::pair<std::size_t, std::size_t>> owners;
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      if (cases_[i].choices.empty())
        rows_.fail(cases_[i], "has no `choices`, which likelihood needs");
      for (std::size_t c = 0; c < cases_[i].choices.size(); ++c) {
        rows.push_back(rows_.with_answer(cases_[i], cases_[i].choices[c]));
        owners.emplace_back(i, c);
      }
    }
    std::vector<std::vector<double>> sums(cases_.size());
    score(rows, [&](std::size_t r, const train::RowScore& scored) {
      const EvalCase& one = cases_[owners[r].first];
      double sum = 0;
      for (std::size_t t = one.prompt.size(); t < scored.logprobs.size(); ++t)
        sum += scored.logprobs[t];
      sums[owners[r].first].push_back(sum);
    });
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      EvalCase& one = cases_[i];
      const auto best = [&](bool by_byte) {
        std::vector<double> values = sums[i];
        for (std::size_t c = 0; c < values.size() && by_byte; ++c)
          values[c] /= static_cast<double>(std::max<std::size_t>(1, one.choices[c].size()));
        return std::max_element(values.begin(), values.end()) - values.begin();
      };
      const std::int64_t right = rows_.right_choice(one);
      one.value["choice_logprobs"] = sums[i];
      one.value["choice"] = best(false);
      table_.add(one.group, kLikelihood, best(false) == right ? 1 : 0);
      table_.add(one.group, "likelihood_per_byte", best(true) == right ? 1 : 0);
    }
  }

  /// exp of the mean loss over the tokens that training would learn.
  void measure_perplexity() {
    std::vector<data::TokenizedRow> learned;
    std::vector<std::vector<std::int32_t>> rows;
    for (const EvalCase& one : cases_) {
      learned.push_back(rows_.learned(one));
      rows.push_back(learned.back().tokens);
    }
    std::map<std::string, std::pair<double, double>> losses;
    score(rows, [&](std::size_t i, const train::RowScore& scored) {
      const data::TokenizedRow& row = learned[i];
      double sum = 0, weight = 0;
      for (std::size_t t = 0; t + 1 < scored.logprobs.size(); ++t) {
        if (row.labels[t] == data::kIgnoredLabel) continue;
        sum -= row.weights[t] * scored.logprobs[t + 1];
        weight += row.weights[t];
      }
      if (weight <= 0) return;
      cases_[i].value["loss"] = sum / weight;
      table_.add(cases_[i].group, kPerplexity, sum / weight, weight);
      for (const std::string& group : {std::string(), cases_[i].group}) {
        losses[group].first += sum;
        losses[group].second += weight;
        if (cases_[i].group.empty()) break;
      }
    });
    if (losses.empty())
      throw_error<DataError>(
          "--input: {}: no row has tokens to learn: "
          "perplexity is of answers or "
          "plain texts",
          options_.rows.input);
    for (const auto& [group, loss] : losses)
      table_.set(group, kPerplexity, std::exp(loss.first / loss.second));
  }

  void generate_and_judge(const std::vector<std::string>& metrics) {
    std::vector<std::unique_ptr<reward::Verifier>> verifiers;
    for (const std::string& metric : metrics) {
      verifiers.push_back(
          metric == kF1 ? nullptr : reward::make_verifier(metric, Json::object(), "--metric"));
    }
    rollout::SamplingOptions sampling =
        sampling_of(options_.sampling, model_.source->generation_config());
    const std::vector<std::int32_t> ends = rollout::end_tokens(*tokenizer_, model_.source.get());
    std::vector<rollout::Request> requests;
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      sampling.seed = rollout::seed_of_row(options_.sampling.seed, i);
      requests.push_back(
          {cases_[i].prompt, options_.max_new_tokens, sampling, ends, options_.stop});
    }
    const auto completions = rollout::generate(model_, tokenizer_, requests, options_.engine);
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      EvalCase& one = cases_[i];
      if (one.truth.is_null()) rows_.fail(one, "has no answer to compare with");
      one.value["output"] = completions[i].text;
      reward::Sample sample;
      sample.id = std::to_string(one.line);
      sample.completion = completions[i].text;
      sample.truth = one.truth;
      sample.is_truncated = completions[i].finish_reason == rollout::FinishReason::kLength;
      for (std::size_t m = 0; m < metrics.size(); ++m) {
        double value = 0;
        if (verifiers[m] == nullptr) {
          value = word_f1(completions[i].text, rows_.truth_text(one));
        } else {
          const reward::Score score = verifiers[m]->judge(sample);
          if (score.error) rows_.fail(one, *score.error);
          value = score.reward;
        }
        one.value["metrics"][metrics[m]] = value;
        table_.add(one.group, metrics[m], value);
      }
    }
  }

  void write() const {
    if (options_.output.empty()) return;
    files::OutputFile output(options_.output);
    for (const EvalCase& one : cases_) output.write(data::json_text::dump(one.value) + "\n");
    output.commit();
  }

  const EvalOptions& options_;
  assembly::ModelOnRanks model_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  EvalRows rows_;
  std::vector<EvalCase> cases_;
  MetricTable table_;
};

int run(EvalOptions options, const Session& session) {
  const std::vector<std::string> names = metric_names();
  for (const std::string& metric : options.metrics) {
    if (std::find(names.begin(), names.end(), metric) == names.end()) {
      throw_error<ConfigError>("--metric is '{}': expected one of {}", text::shown(metric),
                               text::join(names, ", "));
    }
  }
  if (options.max_new_tokens < 1)
    throw_error<ConfigError>("--max-new-tokens is {}: expected 1 or more", options.max_new_tokens);
  const bool is_classifier = head_name(options.model.directory, "") == "classify";
  if (is_classifier && !options.metrics.empty()) {
    throw_error<ConfigError>("--metric: {} is a classifier: accuracy and f1_macro are its metrics",
                             options.model.directory);
  }
  Evaluation evaluation(options, is_classifier);
  const MetricTable table = is_classifier ? evaluation.classify() : evaluation.run();
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
      ->add_option("--input", options->rows.input,
                   "Rows with messages or a prompt, and the right answer")
      ->required()
      ->type_name("IN.jsonl");
  command
      ->add_option("--metric", options->metrics,
                   "exact, numeric, math, contains, f1, likelihood, "
                   "perplexity, ... (repeatable)")
      ->type_name("NAME");
  command
      ->add_option("--answer", options->rows.answer,
                   "Field of the right answer; default answer, else the row's "
                   "own last answer")
      ->type_name("FIELD");
  command->add_option("--group", options->rows.group, "Field whose values get a line each")
      ->type_name("FIELD");
  command->add_option("--output", options->output, "The rows with outputs and metrics")
      ->type_name("OUT.jsonl");
  command->add_flag("--raw", options->rows.raw, "Take `prompt` as it is, without chat template");
  command->add_option("--max-new-tokens", options->max_new_tokens, "At most so many")
      ->capture_default_str();
  command->add_option("--temperature", options->sampling.temperature, "0: the most likely token")
      ->capture_default_str();
  command->add_option("--seed", options->sampling.seed, "Of the sampling")->capture_default_str();
  command->add_option("--stop", options->stop, "End where this text begins (repeatable)");
  command->add_option("--max-sequences", options->engine.max_sequences, "Generated at a time")
      ->capture_default_str();
  add_template_arguments(*command, options->template_arguments);
  command->add_flag("--json", options->json, "Print the metrics as one JSON document");
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
