#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ui/group_samples.h"
#include "ui/metrics.h"

namespace heddle::ui {

struct ReportTable {
  std::string title;
  std::vector<std::string> headers;  ///< empty: none
  std::vector<std::vector<std::string>> rows;
  bool is_folded = false;   ///< shown closed, for long ones such as the configuration
  bool is_drawing = false;  ///< letters stand under each other
};

/// An answer before and after training.
struct ReportSample {
  std::string prompt;
  std::string before;
  std::string after;
};

/// Beginning of the status of a run until it ends.
inline constexpr const char* kRunning = "running";

/// Facts of the report besides the curves. Kept as report.json in the run directory, so that the
/// page can be made anew.
struct ReportFacts {
  std::string title;    ///< "sft: Qwen3.5-0.8B on chat.jsonl"
  std::string status;   ///< "finished", "stopped at step 120 by SIGTERM", ...
  std::string command;  ///< as the user typed it
  std::vector<std::pair<std::string, std::string>> figures;  ///< further tiles: name, value
  std::vector<std::string> warnings;
  std::vector<ReportTable> tables;
  std::vector<ReportSample> samples;
};

/// A page that needs no network: styles, curves and data are inside. Light or dark as the reader's
/// system is.
std::string render_report(const ReportFacts& facts, std::span<const StepMetrics> rows,
                          const GroupSamples& groups = {});

/// Writes report.json and report.html of a run directory from the facts and the directory's
/// metrics.jsonl and groups.jsonl. Throws FileError.
void write_report(const std::filesystem::path& run_directory, const ReportFacts& facts);

/// Makes report.html anew from report.json and groups.jsonl (if there are) and metrics.jsonl, and
/// returns its path. A run that said last that it is running and whose run.lock nobody holds was
/// killed, and the page says so. Throws ConfigError if the folder is no run directory, FileError.
std::filesystem::path rebuild_report(const std::filesystem::path& run_directory);

std::string to_json(const ReportFacts& facts);
/// Throws DataError that names `source`.
ReportFacts report_facts_from_json(const std::string& json, const std::string& source);

}  // namespace heddle::ui
