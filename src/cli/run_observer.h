#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/command.h"
#include "config/run_config.h"
#include "train/observer.h"
#include "ui/metrics.h"
#include "ui/metrics_command.h"
#include "ui/progress.h"
#include "ui/report.h"
#include "ui/tensorboard.h"

namespace heddle::cli {

/// As files of metrics hold it, at this time.
ui::StepMetrics to_metrics(const train::StepInfo& step);

/// An evaluation before the first step, as a row of its own: without what only training gives.
train::StepInfo before_training(const train::Evaluation& evaluation);

/// Answers log.sample_prompts with the model in training. All ranks call it together.
using Sampler = std::function<std::vector<std::string>()>;

/// Ranks besides 0 show and record nothing; they take part in the answers to log.sample_prompts,
/// where RunObserver asks for them.
class QuietObserver : public train::Observer {
 public:
  void sample_with(Sampler sampler) { sampler_ = std::move(sampler); }
  void on_resume(std::int64_t step, const std::filesystem::path&) override { resumed_step_ = step; }
  void on_start(const train::RunInfo&) override {
    if (sampler_ && resumed_step_ == 0) sampler_();
  }
  void on_finish(const train::Summary& summary) override {
    if (sampler_ && !summary.stopped) sampler_();
  }

 private:
  Sampler sampler_;
  std::int64_t resumed_step_ = 0;
};

/// Shows a run on the terminal and records it in its directory: start-up table, progress line,
/// metrics.jsonl, TensorBoard events, config.resolved.yaml, report.html, and the answers to
/// log.sample_prompts before and after.
class RunObserver : public train::Observer {
 public:
  RunObserver(std::string command, const config::RunConfig& config, const Session& session);
  ~RunObserver() override;

  void sample_with(Sampler sampler) { sampler_ = std::move(sampler); }

  void on_tokenize(const std::string& file, double fraction, std::int64_t rows) override;
  void on_start(const train::RunInfo& info) override;
  void on_resume(std::int64_t step, const std::filesystem::path& checkpoint) override;
  void on_step(const train::StepInfo& step) override;
  void on_evaluation(std::int64_t step, const train::Evaluation& evaluation, bool best) override;
  void on_checkpoint(std::int64_t step, const std::filesystem::path& path) override;
  void on_warning(const std::string& message) override { facts_.warnings.push_back(message); }
  void on_finish(const train::Summary& summary) override;
  /// The run ended with an error: the report says so.
  void on_failure(const std::string& message);
  void on_already_finished(const train::Summary& summary, const std::string& limit) override;

 private:
  std::vector<std::string> sample();
  void fill_facts(const train::RunInfo& info);
  /// Answers to log.sample_prompts, for TensorBoard.
  void show_samples(std::int64_t step, const std::vector<std::string>& answers);

  std::string command_;
  const config::RunConfig& config_;
  const Session& session_;
  std::filesystem::path directory_;
  Sampler sampler_;  ///< Empty: none.
  std::int64_t resumed_step_ = 0;
  std::filesystem::path resumed_from_;
  std::unique_ptr<ui::Progress> tokenizing_, progress_;
  std::string tokenizing_file_;
  std::unique_ptr<ui::MetricsWriter> metrics_;
  std::unique_ptr<ui::TensorBoardWriter> tensorboard_;
  std::unique_ptr<ui::MetricsCommand> metrics_command_;
  std::vector<std::string> answers_before_;
  ui::ReportFacts facts_;
};

}  // namespace heddle::cli
