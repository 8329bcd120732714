#include "cli/judged_steps.h"

#include <fmt/format.h>

#include <memory>
#include <string>
#include <utility>

#include "base/hash.h"
#include "cli/answer_evaluation.h"
#include "comm/agreement.h"
#include "comm/world.h"
#include "data/json/json_text.h"

namespace heddle::cli {
namespace {

AnswerEvaluationOptions options_of(const config::EvalSection& eval) {
  AnswerEvaluationOptions options;
  options.rows.input = eval.input;
  options.rows.answer = eval.answer;
  options.rows.most = eval.max_rows;
  options.rows.input_key = "eval.input";
  options.rows.answer_key = "eval.answer";
  options.metrics = eval.metrics;
  options.metrics_key = "eval.metrics";
  options.max_new_tokens = eval.max_new_tokens;
  options.sampling.temperature = 0;
  return options;
}

class JudgedSteps : public train::StepSource {
 public:
  JudgedSteps(const config::RunConfig& config, train::Setup& setup,
              std::unique_ptr<train::StepSource> steps)
      : steps_(std::move(steps)),
        answers_(options_of(config.eval), setup.placed, setup.tokenizer,
                 train::dataset_options(config, train::DataPart::kTrain).rendering,
                 /*is_classifier=*/false) {
    if (const auto& world = setup.placed.context.mesh.world()) require_same_rows(*world);
  }

  const data::LoaderInfo& info() const override { return steps_->info(); }
  std::string summary() const override { return steps_->summary(); }
  std::optional<data::Step> next() override { return steps_->next(); }
  nlohmann::json cursor() override { return steps_->cursor(); }
  void seek(const nlohmann::json& cursor) override { steps_->seek(cursor); }
  void on_updated(train::StepInfo& info) override { steps_->on_updated(info); }
  bool has_evaluation() const override { return steps_->has_evaluation(); }
  train::Evaluation evaluate() override {
    train::Evaluation evaluation = steps_->evaluate();
    const MetricTable table = answers_.run();
    for (const std::string& metric : table.metrics())
      evaluation.metrics.set(metric::kJudged, metric, table.mean(metric));
    return evaluation;
  }

 private:
  /// Each rank answers a part of the rows that it reads.
  void require_same_rows(comm::World& world) const {
    std::uint64_t hash = 0;
    for (const EvalCase& one : answers_.cases())
      hash = hash::of(data::json_text::dump(one.value), hash);
    comm::require_agreement(world, "data",
                            {comm::content_fact("eval.input", fmt::format("{:016x}", hash),
                                                fmt::format("{} rows", answers_.cases().size()))});
  }

  std::unique_ptr<train::StepSource> steps_;
  AnswerEvaluation answers_;
};

}  // namespace

train::Subject judged_subject(const config::RunConfig& config, train::Setup& setup) {
  require_metrics(config.eval.metrics, "eval.metrics");
  train::Subject subject = train::dataset_subject(config, setup);
  subject.steps = std::make_unique<JudgedSteps>(config, setup, std::move(subject.steps));
  return subject;
}

}  // namespace heddle::cli
