#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/metrics.h"

namespace heddle::ui {

/// Report of one optimizer step. Sums are over all ranks; NaN and infinity are written as null.
struct StepMetrics {
  std::int64_t step = 0;         ///< 1 after the first optimizer step; 0: an evaluation before it
  double epoch = 0;              ///< passes over the data so far, with fraction
  double loss = 0;               ///< weighted mean over the global batch
  double lr = 0;                 ///< used in this step
  double grad_norm = 0;          ///< before clipping
  std::int64_t tokens = 0;       ///< real tokens of this step, without padding
  std::int64_t loss_tokens = 0;  ///< tokens that carry loss
  double tokens_per_s = 0;
  double step_s = 0;     ///< wall time of the step
  double unix_time = 0;  ///< when it ended, seconds since 1970 UTC; 0 where it is not known
  double mfu = 0;        ///< share of the hardware's speed of light, 0..1; 0 where it is not known
  std::int64_t memory_bytes = 0;  ///< peak of the device, or resident set on the CPU
  /// eval_loss, aux_loss, ...: written beside the others under their names.
  std::vector<std::pair<std::string, double>> extras;

  /// The extra of that name, or nullptr.
  const double* extra(std::string_view name) const;
  const double* extra(const Metric& metric) const { return extra(metric.name); }
};

/// One JSON object without a line break.
std::string to_json(const StepMetrics& metrics);

/// Every readable row of a metrics.jsonl; a line torn by a crash is left out with a warning. Throws
/// FileError.
std::vector<StepMetrics> read_metrics(const std::filesystem::path& file);

/// Appends a row a step to metrics.jsonl; each row is in the file when write() returns.
class MetricsWriter {
 public:
  /// Keeps the rows up to `resumed_step` of what is there (0: none), so that a resumed run has each
  /// step once; a torn last line is removed. Throws FileError.
  MetricsWriter(std::filesystem::path file, std::int64_t resumed_step);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  /// Throws FileError, for example when the disk is full; the file then ends with a whole row.
  void write(const StepMetrics& metrics);

 private:
  std::filesystem::path file_;
  int descriptor_ = -1;
};

}  // namespace heddle::ui
