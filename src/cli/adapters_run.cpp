#include "cli/adapters_run.h"

#include <cstdlib>
#include <memory>
#include <optional>
#include <ostream>

#include "assembly/from_config.h"
#include "base/errors.h"
#include "base/files.h"
#include "base/log.h"
#include "base/text.h"
#include "cli/continuation.h"
#include "cli/run_observer.h"
#include "cli/stop_request.h"
#include "comm/launch_environment.h"
#include "comm/refusal.h"
#include "comm/world.h"
#include "config/config.h"
#include "config/shared_entries.h"
#include "tenants/adapter_trainer.h"
#include "ui/metrics.h"
#include "ui/progress.h"
#include "ui/tensorboard.h"

namespace heddle::cli {
namespace {

/// Records and shows one adapter of a run.
class AdapterObserver : public train::Observer {
 public:
  explicit AdapterObserver(const config::AdapterRun& run)
      : run_(run), directory_(std::filesystem::path(run.config.train.output_dir) / run.name) {}

  void on_resume(std::int64_t step, const std::filesystem::path& checkpoint) override {
    resumed_step_ = step;
    log::info("adapter {}: continuing after step {} from {}", run_.name, step, checkpoint.string());
  }
  void on_evaluation(std::int64_t step, const train::Evaluation& evaluation, bool best) override {
    log::info("{} step {}: evaluation loss {:.4f}{}", run_.name, step, evaluation.loss,
              best ? " (best so far)" : "");
    if (step == 0) record(before_training(evaluation));
  }
  void on_step(const train::StepInfo& step) override {
    const ui::StepMetrics metrics = record(step);
    if (step.step % run_.config.log.every == 0)
      log::info("{} step {}  {}", run_.name, step.step, text::join(ui::facts_of(metrics), "  "));
  }

 private:
  ui::StepMetrics record(const train::StepInfo& step) {
    if (!metrics_) open();
    const ui::StepMetrics metrics = to_metrics(step);
    metrics_->write(metrics);
    if (tensorboard_) tensorboard_->write(metrics);
    return metrics;
  }
  void open() {
    files::make_writable_directory(directory_);
    files::write_atomically(directory_ / "config.resolved.yaml", config::dump_yaml(run_.config));
    metrics_.emplace(directory_ / "metrics.jsonl", resumed_step_);
    if (run_.config.log.tensorboard)
      tensorboard_.emplace(directory_ / "tensorboard", resumed_step_);
  }

  const config::AdapterRun& run_;
  std::filesystem::path directory_;
  std::int64_t resumed_step_ = 0;
  std::optional<ui::MetricsWriter> metrics_;
  std::optional<ui::TensorBoardWriter> tensorboard_;
};

/// Facts that the ranks must have alike, besides the first adapter's configuration.
std::vector<comm::Fact> facts_of(const std::vector<config::AdapterRun>& runs) {
  std::vector<comm::Fact> facts;
  for (const config::AdapterRun& run : runs) {
    for (auto& [key, value] : config::shared_entries(run.config))
      facts.push_back({fmt::format("{} of adapter {}", key, run.name), value});
  }
  return facts;
}

tenants::AdaptersSummary train(const std::vector<config::AdapterRun>& runs, const StopRequest& stop,
                               const std::shared_ptr<comm::World>& world) {
  return comm::announcing_failure(world.get(), [&] {
    std::vector<std::unique_ptr<train::Observer>> own;
    std::vector<train::Observer*> observers;
    for (const config::AdapterRun& run : runs) {
      if (world && world->rank() > 0) {
        own.push_back(std::make_unique<train::Observer>());
      } else {
        own.push_back(std::make_unique<AdapterObserver>(run));
      }
      observers.push_back(own.back().get());
    }
    return tenants::AdapterTrainer(runs, observers, stop.flag(), world).run();
  });
}

}  // namespace

int run_adapters(const std::vector<config::AdapterRun>& runs, const std::vector<std::string>& begun,
                 const Session& session) {
  const config::RunConfig& shared = runs.front().config;
  log::set_level(shared.log.level);
  for (const config::AdapterRun& run : runs) {
    for (const std::string& sentence : config::unused_keys(run.config))
      log::warning("adapter {}: {}", run.name, sentence);
  }
  StopRequest stop;
  const char* const log_file = std::getenv(comm::kLogVariable);
  if (log_file != nullptr) log::add_file(log_file);
  const std::shared_ptr<comm::World> world = assembly::join_world(shared, "train", facts_of(runs));
  const tenants::AdaptersSummary summary = train(runs, stop, world);
  if (world) world->leave();
  if (world && world->rank() > 0) return 0;
  if (summary.stopped) {
    session.out << "stopped after round " << summary.rounds << "; "
                << continuation(begun, world ? &world->environment() : nullptr,
                                log_file == nullptr ? "" : log_file)
                << "\n";
    return 0;
  }
  std::vector<std::string> failed;
  for (const auto& [name, own, failure] : summary.adapters) {
    if (!failure.empty()) {
      failed.push_back(fmt::format("{} ({})", name, failure));
      continue;
    }
    session.out << fmt::format("{}: {} steps, loss {:.4f} -> {:.4f}, ", name, own.steps,
                               own.first_loss, own.last_loss);
    if (own.has_eval) session.out << fmt::format("best evaluation loss {:.4f}, ", own.best_eval);
    session.out << own.output.string() << "\n";
  }
  if (!failed.empty())
    throw_error<Error>("adapters that did not end: {}", text::join(failed, "; "));
  return 0;
}

}  // namespace heddle::cli
