#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/file_lock.h"
#include "base/files.h"
#include "base/json.h"
#include "ui/report.h"

namespace heddle::ui {

using Json = nlohmann::ordered_json;

std::string to_json(const ReportFacts& facts) {
  Json tables = Json::array(), samples = Json::array(), figures = Json::array();
  for (const ReportTable& t : facts.tables) {
    tables.push_back(
        {{"title", t.title}, {"headers", t.headers}, {"rows", t.rows}, {"is_folded", t.is_folded}});
  }
  for (const ReportSample& s : facts.samples) {
    samples.push_back({{"prompt", s.prompt}, {"before", s.before}, {"after", s.after}});
  }
  for (const auto& [name, value] : facts.figures)
    figures.push_back({{"name", name}, {"value", value}});
  const Json root = {{"title", facts.title},       {"status", facts.status},
                     {"command", facts.command},   {"figures", figures},
                     {"warnings", facts.warnings}, {"tables", tables},
                     {"samples", samples}};
  // Generated text may end inside a character.
  return root.dump(2, ' ', false, Json::error_handler_t::replace);
}

ReportFacts report_facts_from_json(const std::string& text, const std::string& source) {
  ReportFacts facts;
  try {
    const Json root = json::parse_as<DataError>(text, source);
    facts.title = root.at("title");
    facts.status = root.at("status");
    facts.command = root.at("command");
    facts.warnings = root.at("warnings").get<std::vector<std::string>>();
    for (const Json& f : root.at("figures"))
      facts.figures.emplace_back(f.at("name"), f.at("value"));
    for (const Json& t : root.at("tables")) {
      facts.tables.push_back({t.at("title"), t.at("headers"), t.at("rows"), t.at("is_folded")});
    }
    for (const Json& s : root.at("samples")) {
      facts.samples.push_back({s.at("prompt"), s.at("before"), s.at("after")});
    }
  } catch (const Json::exception&) {
    throw_error<DataError>(
        "{}: not the facts of a report: without the file the report is made of metrics.jsonl alone",
        source);
  }
  return facts;
}

namespace {

/// Groups of `heddle rl`; other runs have none.
GroupSamples groups_of(const std::filesystem::path& run_directory) {
  return read_group_samples(run_directory / "groups.jsonl");
}

}  // namespace

void write_report(const std::filesystem::path& run_directory, const ReportFacts& facts) {
  files::write_atomically(run_directory / "report.json", to_json(facts));
  const auto metrics = run_directory / "metrics.jsonl";
  std::vector<StepMetrics> rows;
  if (std::filesystem::exists(metrics)) rows = read_metrics(metrics);
  files::write_atomically(run_directory / "report.html",
                          render_report(facts, rows, groups_of(run_directory)));
}

namespace {

/// True while the process that runs in a directory holds its lock, or where nobody can tell.
bool is_held(const std::filesystem::path& lock) {
  if (!std::filesystem::exists(lock)) return true;
  try {
    return !files::FileLock(lock).try_lock();
  } catch (const FileError&) {
    return true;
  }
}

}  // namespace

std::filesystem::path rebuild_report(const std::filesystem::path& run_directory) {
  const auto metrics = run_directory / "metrics.jsonl";
  if (!std::filesystem::exists(metrics)) {
    throw_error<ConfigError>("{} is not a run directory: it has no metrics.jsonl",
                             run_directory.string());
  }
  ReportFacts facts;
  const auto saved = run_directory / "report.json";
  if (std::filesystem::exists(saved)) {
    facts = report_facts_from_json(files::read(saved), saved.string());
    if (facts.status.starts_with(kRunning) && !is_held(run_directory / "run.lock"))
      facts.status = "ended without a word: killed, or its machine went down";
  } else {
    const auto name = std::filesystem::absolute(run_directory / ".").parent_path().filename();
    facts.title = name.string();
    facts.status = "in progress, or stopped before its report was written";
  }
  const auto page = run_directory / "report.html";
  files::write_atomically(page,
                          render_report(facts, read_metrics(metrics), groups_of(run_directory)));
  return page;
}

}  // namespace heddle::ui
