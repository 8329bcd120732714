#include "cli/run_observer.h"

#include <unistd.h>

#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>
#include <ostream>

#include "base/files.h"
#include "base/log.h"
#include "base/text.h"
#include "config/config.h"
#include "ui/table.h"

namespace heddle::cli {

ui::StepMetrics to_metrics(const train::StepInfo& step) {
  ui::StepMetrics metrics;
  metrics.step = step.step;
  metrics.epoch = step.epoch;
  metrics.loss = step.loss;
  metrics.lr = step.lr;
  metrics.grad_norm = step.grad_norm;
  metrics.tokens = step.tokens;
  metrics.loss_tokens = step.loss_tokens;
  metrics.tokens_per_s = step.tokens_per_s;
  metrics.step_s = step.seconds;
  metrics.unix_time =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  metrics.mfu = step.mfu;
  metrics.memory_bytes = step.memory_bytes;
  for (const Metrics::Entry& entry : step.metrics)
    metrics.extras.emplace_back(entry.name, entry.value);
  return metrics;
}

train::StepInfo before_training(const train::Evaluation& evaluation) {
  train::StepInfo info;
  info.loss = info.lr = info.grad_norm = std::numeric_limits<double>::quiet_NaN();
  info.add(evaluation);
  return info;
}

namespace {

/// Where the result is; of an adapter also the class of transformers that it acts on.
std::string result_line(const train::Summary& summary) {
  if (summary.adapted_class.empty()) return "model:  " + summary.output.string();
  return fmt::format("adapter: {} (in Python on {})", summary.output.string(),
                     summary.adapted_class);
}

std::string percent(std::int64_t part, std::int64_t whole) {
  return fmt::format(
      "{:.1f} %", whole > 0 ? 100.0 * static_cast<double>(part) / static_cast<double>(whole) : 0.0);
}

/// Rank 0 alone is observed.
const char* of_one_rank(const train::RunInfo& info) { return info.ranks > 1 ? " of rank 0" : ""; }

ui::Table startup_table(const train::RunInfo& info) {
  ui::Table table({}, {ui::Align::kLeft, ui::Align::kRight, ui::Align::kRight});
  table.section("model: " + info.model_type + ", " + info.dtype);
  for (const auto& [kind, count] : info.parameters) {
    table.row({kind, text::format_count(static_cast<double>(count)),
               percent(count, info.total_parameters)});
  }
  table.row({"all parameters", text::format_count(static_cast<double>(info.total_parameters)), ""});
  table.row({"trained", text::format_count(static_cast<double>(info.trainable_parameters)),
             percent(info.trainable_parameters, info.total_parameters)});
  table.section(fmt::format("memory{} on {}", of_one_rank(info), info.device));
  std::int64_t total = 0;
  for (const auto& [purpose, bytes] : info.memory) {
    table.row({purpose, text::format_bytes(static_cast<double>(bytes)), ""});
    total += bytes;
  }
  table.row({"sum", text::format_bytes(static_cast<double>(total)), ""});
  table.section("layout: " + info.layout);
  table.section("data: " + info.data_summary);
  table.row(
      {"tokens per epoch", text::format_count(static_cast<double>(info.tokens_per_epoch)), ""});
  table.row({"steps per epoch", std::to_string(info.steps_per_epoch), ""});
  table.row({"steps", std::to_string(info.total_steps), ""});
  table.row({"packing efficiency", fmt::format("{:.1f} %", 100 * info.packing_efficiency), ""});
  table.section("kernels");
  for (const std::string& line : info.kernels) {
    const std::size_t colon = line.find(": ");
    table.row({line.substr(0, colon), line.substr(colon + 2), ""});
  }
  return table;
}

/// A text as a block of Markdown that shows it as it is.
std::string as_code(const std::string& text) {
  std::string block = "    ";
  for (const char c : text) {
    block += c;
    if (c == '\n') block += "    ";
  }
  return block;
}

/// Outcome of each file: rows, lengths, loss, and what was cut or left out.
ui::ReportTable sources_table(const std::vector<train::DataInfo>& data) {
  ui::ReportTable table{"Sources",
                        {"file", "rows", "tokens", "with loss", "longest", "cut", "tokens cut",
                         "split", "too long", "without loss", "bad rows"},
                        {},
                        false};
  for (const train::DataInfo& rows : data) {
    for (const auto& [path, r] : rows.files) {
      std::vector<std::string> cells = {rows.name + ": " + path};
      for (const std::int64_t count :
           {r.rows, r.tokens, r.loss_tokens, r.longest_row, r.truncated, r.cut_tokens, r.split,
            r.dropped_long, r.dropped_no_loss, r.bad_rows})
        cells.push_back(std::to_string(count));
      table.rows.push_back(std::move(cells));
    }
    table.rows.push_back({fmt::format(
        "{}: lengths: 10 % of rows up to {} tokens, half up to {}, 90 % "
        "up to {}, 99 % up to {}",
        rows.name, rows.lengths[0], rows.lengths[1], rows.lengths[2], rows.lengths[3])});
  }
  return table;
}

}  // namespace

RunObserver::RunObserver(std::string command, const config::RunConfig& config,
                         const Session& session)
    : command_(std::move(command)),
      config_(config),
      session_(session),
      directory_(config.train.output_dir) {
  facts_.command = session.command_line;
}

RunObserver::~RunObserver() = default;

void RunObserver::on_tokenize(const std::string& file, double fraction, std::int64_t rows) {
  if (file != tokenizing_file_) {
    tokenizing_file_ = file;
    tokenizing_ = std::make_unique<ui::Progress>(
        "tokenize " + std::filesystem::path(file).filename().string(), 100,
        ui::ProgressStyle::detect(100), "%");
  }
  // A small compressed file is read to its end while most of its rows are still to come.
  if (tokenizing_ == nullptr) return;
  tokenizing_->update(static_cast<std::int64_t>(fraction * 100), {fmt::format("{} rows", rows)});
  if (fraction >= 1) tokenizing_.reset();
}

void RunObserver::on_resume(std::int64_t step, const std::filesystem::path& checkpoint) {
  resumed_step_ = step;
  resumed_from_ = checkpoint;
}

std::vector<std::string> RunObserver::sample() {
  return sampler_ ? sampler_() : std::vector<std::string>();
}

void RunObserver::on_start(const train::RunInfo& info) {
  tokenizing_.reset();
  if (resumed_step_ > 0)
    log::info("continuing after step {} from {}", resumed_step_, resumed_from_.string());
  files::make_writable_directory(directory_);
  files::write_atomically(directory_ / "config.resolved.yaml", config::dump_yaml(config_));
  log::info("{}", ui::render_for(startup_table(info), STDERR_FILENO));
  for (const std::string& sentence : info.idle) log::warning("{}", sentence);
  for (const std::string& value : info.defaulted)
    log::info("config.json does not give it, default used: {}", value);
  if (!info.undecayed.empty() && config_.optim.weight_decay > 0) {
    log::info("no weight decay on {} parameters: {}", info.undecayed.size(),
              text::list_some(info.undecayed, 6));
  }
  fill_facts(info);
  metrics_ = std::make_unique<ui::MetricsWriter>(directory_ / "metrics.jsonl", resumed_step_);
  if (config_.log.tensorboard) {
    tensorboard_ =
        std::make_unique<ui::TensorBoardWriter>(directory_ / "tensorboard", resumed_step_);
    tensorboard_->hyper_parameters(config::entries(config_));
  }
  if (!config_.log.command.empty()) {
    metrics_command_ = std::make_unique<ui::MetricsCommand>(config_.log.command);
    metrics_command_->write(fmt::format(R"({{"run":{},"step":{},"config":{}}})",
                                        nlohmann::json(directory_.string()).dump(), resumed_step_,
                                        nlohmann::json::parse(config::dump_json(config_)).dump()));
  }
  if (resumed_step_ == 0) {
    answers_before_ = sample();
    for (std::size_t i = 0; i < answers_before_.size(); ++i) {
      facts_.samples.push_back({config_.log.sample_prompts[i], answers_before_[i], ""});
    }
    show_samples(0, answers_before_);
  }
  if (resumed_step_ > 0 && std::filesystem::exists(directory_ / "report.json")) {
    // The answers of the untrained model were written when the run began.
    const auto path = directory_ / "report.json";
    facts_.samples = ui::report_facts_from_json(files::read(path), path.string()).samples;
  }
  if (config_.log.report) ui::write_report(directory_, facts_);
  progress_ = std::make_unique<ui::Progress>(
      command_, info.total_steps, ui::ProgressStyle::detect(config_.log.every), "", resumed_step_);
}

void RunObserver::fill_facts(const train::RunInfo& info) {
  facts_.title = fmt::format("{}: {}", command_,
                             std::filesystem::path(config_.model.path).filename().string());
  facts_.status = fmt::format("{}, when this page was written; `heddle report {}` looks again",
                              ui::kRunning, directory_.string());
  facts_.figures = {
      {"parameters", text::format_count(static_cast<double>(info.total_parameters))},
      {"trained", text::format_count(static_cast<double>(info.trainable_parameters))},
      {"tokens per epoch", text::format_count(static_cast<double>(info.tokens_per_epoch))}};
  ui::ReportTable parameters{"Parameters", {"kind", "count"}, {}, false};
  for (const auto& [kind, count] : info.parameters)
    parameters.rows.push_back({kind, std::to_string(count)});
  ui::ReportTable memory{
      fmt::format("Memory{}", of_one_rank(info)), {"purpose", "size"}, {}, false};
  for (const auto& [purpose, bytes] : info.memory) {
    memory.rows.push_back({purpose, text::format_bytes(static_cast<double>(bytes))});
  }
  ui::ReportTable layout{
      "Layout", {}, {{"mesh", info.layout}, {"device", info.device}, {"dtype", info.dtype}}, false};
  ui::ReportTable kernels{"Kernels", {"operator", "kernel"}, {}, false};
  for (const std::string& line : info.kernels) {
    const std::size_t colon = line.find(": ");
    kernels.rows.push_back({line.substr(0, colon), line.substr(colon + 2)});
  }
  ui::ReportTable configuration{"Configuration", {"key", "value"}, {}, true};
  for (const auto& [key, value] : config::entries(config_))
    configuration.rows.push_back({key, value});
  ui::ReportTable data{
      "Data",
      {},
      {{"rows", info.data_summary},
       {"tokens per epoch", std::to_string(info.tokens_per_epoch)},
       {"steps per epoch", std::to_string(info.steps_per_epoch)},
       {"packing efficiency", fmt::format("{:.1f} %", 100 * info.packing_efficiency)}},
      false};
  facts_.tables = {parameters, data, memory, layout, kernels, configuration};
  if (!info.data.empty()) facts_.tables.insert(facts_.tables.begin() + 2, sources_table(info.data));
  facts_.warnings = info.bad_examples;
  if (info.pipeline.empty()) return;
  ui::ReportTable pipeline{"Pipeline: a usual step, forward 0-9, backward a-z",
                           {"stage rank", "schedule"},
                           {},
                           false,
                           /*is_drawing=*/true};
  for (std::size_t i = 0; i < info.pipeline.size(); ++i)
    pipeline.rows.push_back({std::to_string(i), info.pipeline[i]});
  facts_.tables.insert(facts_.tables.begin() + 4, pipeline);
}

void RunObserver::show_samples(std::int64_t step, const std::vector<std::string>& answers) {
  if (!tensorboard_) return;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    tensorboard_->text(fmt::format("samples/{}", i + 1), step,
                       as_code(config_.log.sample_prompts[i]) + "\n\n" + as_code(answers[i]));
  }
}

void RunObserver::on_step(const train::StepInfo& step) {
  const ui::StepMetrics metrics = to_metrics(step);
  metrics_->write(metrics);
  if (tensorboard_) tensorboard_->write(metrics);
  if (metrics_command_) metrics_command_->write(ui::to_json(metrics));
  progress_->update(metrics);
}

void RunObserver::on_evaluation(std::int64_t step, const train::Evaluation& evaluation, bool best) {
  std::string line = fmt::format("step {}: evaluation loss {:.4f}", step, evaluation.loss);
  for (const Metrics::Entry& entry : evaluation.metrics)
    line += fmt::format(", {} {:.4f}", entry.name, entry.value);
  log::info("{}{}", line, best ? " (best so far)" : "");
  if (step > 0) return;
  const ui::StepMetrics metrics = to_metrics(before_training(evaluation));
  metrics_->write(metrics);
  if (tensorboard_) tensorboard_->write(metrics);
  if (metrics_command_) metrics_command_->write(ui::to_json(metrics));
}

void RunObserver::on_checkpoint(std::int64_t, const std::filesystem::path&) {
  if (config_.log.report) ui::write_report(directory_, facts_);
}

void RunObserver::on_finish(const train::Summary& summary) {
  progress_->finish();
  progress_.reset();
  if (!summary.stopped) {
    const std::vector<std::string> answers = sample();
    for (std::size_t i = 0; i < answers.size() && i < facts_.samples.size(); ++i)
      facts_.samples[i].after = answers[i];
    show_samples(summary.steps, answers);
  }
  if (tensorboard_) tensorboard_->end(true);
  facts_.status = summary.stopped ? fmt::format("stopped after step {}", summary.steps)
                  : summary.stopped_early
                      ? fmt::format("stopped early after step {}", summary.steps)
                      : "finished";
  if (config_.log.report) ui::write_report(directory_, facts_);
  metrics_command_.reset();  // its own last words come before ours
  std::ostream& out = session_.out;
  // The report counts this process, except for the losses, which are the whole run's.
  const bool is_resumed = resumed_step_ > 0;
  out << fmt::format("{} in {}, loss {:.4f} -> {:.4f}{}",
                     is_resumed ? fmt::format("{} steps after the {} before",
                                              summary.steps - resumed_step_, resumed_step_)
                                : fmt::format("{} steps", summary.steps),
                     text::format_duration(summary.seconds), summary.first_loss, summary.last_loss,
                     is_resumed ? " from the first step to the last" : "");
  if (summary.has_eval)
    out << fmt::format(", best evaluation {} {:.4f}", summary.best_metric, summary.best_eval);
  out << "\n";
  for (const ui::ReportSample& answer : facts_.samples) {
    out << "prompt: " << answer.prompt << "\n  before: " << answer.before
        << "\n  after:  " << answer.after << "\n";
  }
  if (!summary.output.empty()) out << result_line(summary) << "\n";
  if (config_.log.report) out << "report: " << (directory_ / "report.html").string() << "\n";
}

void RunObserver::on_failure(const std::string& message) {
  if (progress_ == nullptr) return;  // nothing was recorded
  facts_.status = "failed: " + message.substr(0, message.find('\n'));
  try {
    if (tensorboard_) tensorboard_->end(false);
    if (config_.log.report) ui::write_report(directory_, facts_);
  } catch (const std::exception& error) {
    log::warning("the report does not say that the run failed: {}", error.what());
  }
}

void RunObserver::on_already_finished(const train::Summary& summary, const std::string& limit) {
  tokenizing_.reset();
  session_.out << fmt::format(
      "already finished after step {} ({}), loss {:.4f} -> {:.4f}: nothing to train; for more "
      "raise {}\n"
      "{}\n",
      summary.steps, limit, summary.first_loss, summary.last_loss, limit.substr(0, limit.find(' ')),
      result_line(summary));
}

}  // namespace heddle::cli
