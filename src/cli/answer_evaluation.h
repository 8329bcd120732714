#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "cli/eval_metrics.h"
#include "cli/eval_rows.h"
#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"
#include "rollout/engine.h"
#include "train/scorer.h"

namespace heddle::cli {

struct AnswerEvaluationOptions {
  EvalRowOptions rows;
  std::vector<std::string> metrics;  ///< empty: those that the rows are made for
  std::string metrics_key = "--metric";
  std::vector<std::string> stop;
  std::int64_t max_new_tokens = 256;
  rollout::SamplingOptions sampling;
  rollout::EngineOptions engine;
};

/// All metrics by name.
std::vector<std::string> metric_names();

/// Throws ConfigError that begins with `key` if one is no metric, or needs parameters.
void require_metrics(const std::vector<std::string>& metrics, const std::string& key);

/// Judges what a language model answers to rows, or a classifier says of them. All ranks of the
/// model make the same calls and get the same results.
class AnswerEvaluation {
 public:
  /// Reads the rows. Throws DataError. Model and tokenizer outlive it.
  AnswerEvaluation(const AnswerEvaluationOptions& options, assembly::ModelOnRanks& model,
                   std::shared_ptr<const data::Tokenizer> tokenizer,
                   const data::RenderOptions& rendering, bool is_classifier);

  AnswerEvaluation(const AnswerEvaluation&) = delete;
  AnswerEvaluation& operator=(const AnswerEvaluation&) = delete;

  MetricTable run();
  MetricTable classify();
  /// The rows, after run() or classify() with outputs and metrics.
  const std::vector<EvalCase>& cases() const { return cases_; }

 private:
  std::vector<std::string> metrics() const;
  template <class Use>
  void score(const std::vector<std::vector<std::int32_t>>& rows, Use use);
  void choose(MetricTable& table);
  void measure_perplexity(MetricTable& table);
  void generate_and_judge(const std::vector<std::string>& metrics, MetricTable& table);

  AnswerEvaluationOptions options_;
  assembly::ModelOnRanks& model_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  EvalRows rows_;
  std::vector<EvalCase> cases_;
};

}  // namespace heddle::cli
