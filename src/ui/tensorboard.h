#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ui/metrics.h"

namespace heddle::ui {

/// CRC-32C (Castagnoli), as TFRecord files use it.
std::uint32_t crc32c(std::string_view bytes);
/// The rotated and shifted form in which TFRecord stores it, so that a checksum of checksums stays
/// useful.
std::uint32_t masked_crc32c(std::string_view bytes);

/// Writes scalars as a TensorBoard event file: TFRecord framing around hand-encoded Event protocol
/// buffers (tensorflow/core/util/event.proto, fields wall_time 1, step 2, file_version 3, summary
/// 5, session_log 7); texts and hyper-parameters in those of the plugins "text" and "hparams".
class TensorBoardWriter {
 public:
  /// Makes a new file in `folder`. A writer that starts after step `resumed_step` > 0 tells
  /// TensorBoard to forget what earlier files hold beyond it. Throws FileError.
  TensorBoardWriter(const std::filesystem::path& folder, std::int64_t resumed_step);
  ~TensorBoardWriter();
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;

  /// One value of the curve `tag`. Throws FileError.
  void scalar(std::string_view tag, std::int64_t step, double value);
  /// All figures of a step, under train/, speed/ and eval/, in one event. Throws FileError.
  void write(const StepMetrics& metrics);
  /// Markdown under `tag` of the page "Text". Throws FileError.
  void text(std::string_view tag, std::int64_t step, std::string_view markdown);
  /// (name, value as YAML) for the page "HParams": numbers and true or false become such. Throws
  /// FileError.
  void hyper_parameters(const std::vector<std::pair<std::string, std::string>>& entries);
  /// The end of the run, for the same page. Throws FileError.
  void end(bool succeeded);

 private:
  void event(std::int64_t step, std::string_view field_bytes);
  void hparams_event(std::string_view tag, int field, std::string_view message);

  std::filesystem::path file_;
  int descriptor_ = -1;
};

}  // namespace heddle::ui
