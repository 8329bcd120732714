#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "serve/http/limits.h"
#include "serve/samples_in_flight.h"
#include "serve/tinker/service.h"

namespace heddle::serve {

/// Settings of a server by key=value. Everything else is the model's (device.*, model.dtype,
/// kernels.*).
struct Settings {
  std::int64_t max_samples = SamplesInFlight::kMost;  ///< Under way, of one tenant.
  std::int64_t max_sequences = 16;
  std::int64_t max_context = 4096;
  std::int64_t pass_tokens = 16384;
  bool deterministic = false;
  std::int64_t max_body_bytes = std::int64_t{64} << 20;
  double drain_s = 30;
  double turn_s = 900;               ///< See ModelThread::overdue; 0: turns have no deadline.
  Limits limits = {.max_runs = 30};  ///< Each tenant's, unless its key sets others.
  tinker::ServiceOptions tinker;
  std::vector<std::string> of_model;  ///< The settings that are not serve.*.
};

/// One key of Settings, for parsing and for the documents.
struct SettingRow {
  const char* key;
  const char* meaning;
  std::string value;  ///< The default.
};
std::vector<SettingRow> setting_rows();

/// Throws ConfigError that names the key, what was expected and the nearest key.
Settings read_settings(const std::vector<std::string>& arguments);

}  // namespace heddle::serve
