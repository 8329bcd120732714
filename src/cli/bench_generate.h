#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "config/config.h"

namespace heddle::cli {

/// Sequences of random tokens that are all continued at once.
struct GeneratePoint {
  std::int64_t batch = 1;         ///< Sequences.
  std::int64_t length = 2048;     ///< Tokens of each prompt.
  std::int64_t new_tokens = 128;  ///< Drawn for each.
};

/// A run of `heddle bench generate`.
struct GenerateBench {
  std::string preset;
  std::vector<GeneratePoint> points;
  std::int64_t samples = 1;  ///< Sequences that share a prompt.
  std::int64_t top_k = 0;    ///< At temperature 1, as top_p.
  double top_p = 1;
  /// Different sets of adapters that the sequences have in turn; 0: all have the run's, if it has
  /// adapters.
  std::int64_t sets = 0;
  bool records = true;  ///< Steps are recorded as graphs, where the engine can.
  /// Gets a profile of some steps more of the last point, if not empty.
  std::filesystem::path profile;
};

/// "64x1024x128", batch, length and new tokens. Throws ConfigError.
GeneratePoint parse_point(const std::string& text);

/// For each point the time to the first token, rates of prompt and new tokens, and the memory
/// traffic that a step cannot do without, with its share of what a copy reaches. Throws ConfigError
/// for a preset that does not exist, DeviceError.
nlohmann::ordered_json run_generate_bench(const GenerateBench& bench,
                                          const config::RunConfig& config);
std::string generate_bench_table(const nlohmann::ordered_json& result);

}  // namespace heddle::cli
