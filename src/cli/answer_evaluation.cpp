#include "cli/answer_evaluation.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <utility>

#include "base/errors.h"
#include "base/quote.h"
#include "base/text.h"
#include "cli/model_arguments.h"
#include "data/batch.h"
#include "objective/class_counts.h"
#include "reward/verifiers.h"
#include "rollout/answers.h"

namespace heddle::cli {
namespace {

constexpr const char* kF1 = "f1";
constexpr const char* kLikelihood = "likelihood";
constexpr const char* kPerplexity = "perplexity";
/// Tokens scored in one pass.
constexpr std::int64_t kBatchTokens = 8192;

bool is_verifier(const std::string& metric) {
  return metric != kF1 && metric != kLikelihood && metric != kPerplexity;
}

data::RowOptions reading_of(const assembly::ModelOnRanks& model, bool is_classifier) {
  data::RowOptions reading;
  reading.task = data::Task::kEmbedding;
  if (is_classifier && model.model->num_labels() == 1) {
    throw ConfigError(
        "the model has one label, a number (regression or reward), and no class to be right about: "
        "heddle score MODEL --input FILE writes the numbers");
  }
  if (is_classifier) {
    reading.task = data::Task::kClassification;
    reading.classes = model.model->num_labels();
    reading.class_names = model.label_names;
  }
  return reading;
}

}  // namespace

std::vector<std::string> metric_names() {
  std::vector<std::string> names = reward::verifier_names();
  for (const char* own : {kF1, kLikelihood, kPerplexity}) names.emplace_back(own);
  return names;
}

void require_metrics(const std::vector<std::string>& metrics, const std::string& key) {
  const std::vector<std::string> names = metric_names();
  for (const std::string& metric : metrics) {
    if (std::find(names.begin(), names.end(), metric) == names.end()) {
      throw_error<ConfigError>("{} is '{}': expected one of {}", key, text::shown(metric),
                               text::join(names, ", "));
    }
    if (is_verifier(metric)) reward::make_verifier(metric, nlohmann::ordered_json::object(), key);
  }
}

AnswerEvaluation::AnswerEvaluation(const AnswerEvaluationOptions& options,
                                   assembly::ModelOnRanks& model,
                                   std::shared_ptr<const data::Tokenizer> tokenizer,
                                   const data::RenderOptions& rendering, bool is_classifier)
    : options_(options),
      model_(model),
      tokenizer_(std::move(tokenizer)),
      rows_(*tokenizer_, options_.rows, rendering, reading_of(model, is_classifier)),
      cases_(rows_.read()) {}

MetricTable AnswerEvaluation::run() {
  MetricTable table;
  std::vector<std::string> judged;
  for (const std::string& metric : metrics()) {
    if (metric == kLikelihood) {
      choose(table);
    } else if (metric == kPerplexity) {
      measure_perplexity(table);
    } else {
      judged.push_back(metric);
    }
  }
  if (!judged.empty()) generate_and_judge(judged, table);
  return table;
}

MetricTable AnswerEvaluation::classify() {
  MetricTable table;
  const std::vector<std::string>& names = model_.label_names;
  std::map<std::string, objective::ClassCounts> counts;
  const auto count = [&](const std::string& group, std::int64_t prediction, std::int64_t label) {
    counts.try_emplace(group, model_.model->num_labels()).first->second.add(prediction, label);
  };
  std::vector<std::vector<std::int32_t>> rows;
  for (const EvalCase& one : cases_) rows.push_back(one.prompt);
  score(rows, [&](std::size_t i, const train::RowScore& scored) {
    const auto best = std::max_element(scored.outputs.begin(), scored.outputs.end());
    const std::int64_t prediction = best - scored.outputs.begin();
    cases_[i].value["prediction"] = prediction;
    if (!names.empty())
      cases_[i].value["predicted_label"] = names[static_cast<std::size_t>(prediction)];
    count("", prediction, cases_[i].label);
    if (!cases_[i].group.empty()) count(cases_[i].group, prediction, cases_[i].label);
    table.add(cases_[i].group, "accuracy", prediction == cases_[i].label ? 1 : 0);
  });
  for (const auto& [group, predictions] : counts)
    table.set(group, "f1_macro", predictions.macro_f1());
  return table;
}

/// The requested metric, or the one that the rows are made for.
std::vector<std::string> AnswerEvaluation::metrics() const {
  if (!options_.metrics.empty()) return options_.metrics;
  if (!cases_.front().choices.empty()) return {kLikelihood};
  return {"exact", kF1};
}

/// Scores rows in passes of bounded size.
template <class Use>
void AnswerEvaluation::score(const std::vector<std::vector<std::int32_t>>& rows, Use use) {
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
void AnswerEvaluation::choose(MetricTable& table) {
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
    table.add(one.group, kLikelihood, best(false) == right ? 1 : 0);
    table.add(one.group, "likelihood_per_byte", best(true) == right ? 1 : 0);
  }
}

/// exp of the mean loss over the tokens that training would learn.
void AnswerEvaluation::measure_perplexity(MetricTable& table) {
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
    table.add(cases_[i].group, kPerplexity, sum / weight, weight);
    for (const std::string& group : {std::string(), cases_[i].group}) {
      losses[group].first += sum;
      losses[group].second += weight;
      if (cases_[i].group.empty()) break;
    }
  });
  if (losses.empty())
    throw_error<DataError>(
        "{}: {}: no row has tokens to learn: perplexity is of answers or plain texts",
        options_.rows.input_key, options_.rows.input);
  for (const auto& [group, loss] : losses)
    table.set(group, kPerplexity, std::exp(loss.first / loss.second));
}

void AnswerEvaluation::generate_and_judge(const std::vector<std::string>& metrics,
                                          MetricTable& table) {
  std::vector<std::unique_ptr<reward::Verifier>> verifiers;
  for (const std::string& metric : metrics) {
    verifiers.push_back(metric == kF1
                            ? nullptr
                            : reward::make_verifier(metric, nlohmann::ordered_json::object(),
                                                    options_.metrics_key));
  }
  rollout::SamplingOptions sampling = options_.sampling;
  const std::vector<std::int32_t> ends = rollout::end_tokens(*tokenizer_, model_.source.get());
  std::vector<rollout::Request> requests;
  for (std::size_t i = 0; i < cases_.size(); ++i) {
    rows_.require_answer(cases_[i]);
    sampling.seed = rollout::seed_of_row(options_.sampling.seed, i);
    requests.push_back({cases_[i].prompt, options_.max_new_tokens, sampling, ends, options_.stop});
  }
  const auto completions = rollout::generate(model_, tokenizer_, requests, options_.engine);
  for (std::size_t i = 0; i < cases_.size(); ++i) {
    EvalCase& one = cases_[i];
    // A row's own `output` is the right answer, which stays beside the model's.
    if (one.value.contains("output") && !one.value.contains("answer"))
      one.value["answer"] = one.value["output"];
    one.value["output"] = completions[i].text;
    one.value["metrics"] = nlohmann::ordered_json::object();
    reward::Sample sample;
    sample.id = std::to_string(one.line);
    sample.completion = completions[i].text;
    sample.truth = one.truth;
    sample.is_truncated = completions[i].finish_reason == rollout::FinishReason::kLength;
    for (std::size_t m = 0; m < metrics.size(); ++m) {
      double value = 0;
      if (verifiers[m] == nullptr) {
        value = best_word_f1(completions[i].text, one.truth);
      } else {
        const reward::Score score = verifiers[m]->judge(sample);
        if (score.error) rows_.fail(one, *score.error);
        value = score.reward;
      }
      one.value["metrics"][metrics[m]] = value;
      table.add(one.group, metrics[m], value);
    }
  }
}

}  // namespace heddle::cli
