#include "ui/metrics.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

#include "base/errors.h"
#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/metrics.h"
#include "base/text.h"

namespace heddle::ui {
namespace {

using Json = nlohmann::ordered_json;

/// The fixed fields with their names, in the order of the file.
constexpr auto kFields =
    std::make_tuple(std::pair{metric::kStep.name, &StepMetrics::step},
                    std::pair{metric::kEpoch.name, &StepMetrics::epoch},
                    std::pair{metric::kLoss.name, &StepMetrics::loss},
                    std::pair{metric::kLr.name, &StepMetrics::lr},
                    std::pair{metric::kGradNorm.name, &StepMetrics::grad_norm},
                    std::pair{metric::kTokens.name, &StepMetrics::tokens},
                    std::pair{metric::kLossTokens.name, &StepMetrics::loss_tokens},
                    std::pair{metric::kTokensPerSecond.name, &StepMetrics::tokens_per_s},
                    std::pair{metric::kStepSeconds.name, &StepMetrics::step_s},
                    std::pair{metric::kUnixTime.name, &StepMetrics::unix_time},
                    std::pair{metric::kMfu.name, &StepMetrics::mfu},
                    std::pair{metric::kMemoryBytes.name, &StepMetrics::memory_bytes});

template <class Visit>
void for_each_field(Visit visit) {
  std::apply([&](const auto&... field) { (visit(field.first, field.second), ...); }, kFields);
}

double number_or_nan(const Json& value) {
  return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
}

std::optional<StepMetrics> parse_row(std::string_view line) {
  Json row;
  try {
    row = json::parse(line);
  } catch (const DataError&) {
    return {};
  }
  if (!row.is_object() || !row.contains("step") || !row["step"].is_number_integer()) return {};
  StepMetrics metrics;
  for_each_field([&](std::string_view name, auto member) {
    const auto entry = row.find(std::string(name));
    if (entry == row.end()) return;
    if constexpr (std::is_same_v<decltype(member), double StepMetrics::*>) {
      metrics.*member = number_or_nan(*entry);
    } else if (entry->is_number()) {
      metrics.*member = entry->get<std::int64_t>();
    }
    row.erase(entry);
  });
  for (const auto& [name, value] : row.items()) {
    if (value.is_number() || value.is_null())
      metrics.extras.emplace_back(name, number_or_nan(value));
  }
  return metrics;
}

/// Calls visit(line, row) for each readable row of the text; warns of the others.
template <class Visit>
void for_each_row(const std::filesystem::path& file, std::string_view text, Visit visit) {
  std::size_t number = 0;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    ++number;
    if (line.empty()) continue;
    if (const auto row = parse_row(line)) {
      visit(line, *row);
    } else {
      log::warning("{}:{}: not a metrics row, left out (an interrupted write?)", file.string(),
                   number);
    }
  }
}

}  // namespace

const double* StepMetrics::extra(std::string_view name) const {
  for (const auto& [key, value] : extras) {
    if (key == name) return &value;
  }
  return nullptr;
}

std::string to_json(const StepMetrics& metrics) {
  Json row;
  for_each_field(
      [&](std::string_view name, auto member) { row[std::string(name)] = metrics.*member; });
  for (const auto& [name, value] : metrics.extras) row[name] = value;
  return row.dump();  // nlohmann writes NaN and infinity as null
}

std::vector<StepMetrics> read_metrics(const std::filesystem::path& file) {
  std::vector<StepMetrics> rows;
  const std::string text = files::read(file);
  for_each_row(file, text, [&](std::string_view, const StepMetrics& row) { rows.push_back(row); });
  return rows;
}

MetricsWriter::MetricsWriter(std::filesystem::path file, std::int64_t resumed_step)
    : file_(std::move(file)) {
  if (std::filesystem::exists(file_)) {
    const std::string old = files::read(file_);
    std::string kept;
    for_each_row(file_, old, [&](std::string_view line, const StepMetrics& row) {
      if (resumed_step > 0 && row.step <= resumed_step) kept.append(line).append("\n");
    });
    if (kept != old) files::write_atomically(file_, kept);
  }
  descriptor_ = files::open_to_append(file_);
}

MetricsWriter::~MetricsWriter() {
  if (descriptor_ >= 0) close(descriptor_);
}

void MetricsWriter::write(const StepMetrics& metrics) {
  const std::string line = to_json(metrics) + "\n";
  const off_t start = lseek(descriptor_, 0, SEEK_END);
  std::size_t done = 0;
  while (done < line.size()) {
    const ssize_t count = ::write(descriptor_, line.data() + done, line.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      const int reason = errno;
      // The next reader then finds whole rows only.
      if (start >= 0 && ftruncate(descriptor_, start) != 0)
        log::warning("{} ends with a torn row", file_.string());
      throw_error<FileError>("cannot write {}: {}", file_.string(), strerror(reason));
    }
    done += static_cast<std::size_t>(count);
  }
}

}  // namespace heddle::ui
