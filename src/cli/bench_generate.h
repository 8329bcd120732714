#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "config/config.h"

namespace heddle::cli {

/// Settings of `heddle bench generate`: sequences of random tokens that are all continued at once.
struct GenerateBench {
  std::string preset;
  std::int64_t batch = 1;         ///< Sequences.
  std::int64_t length = 2048;     ///< Tokens of each prompt.
  std::int64_t new_tokens = 128;  ///< Drawn for each at temperature 1.
};

/// Time to the first token, rates of prompt and new tokens, and the memory traffic that a step
/// cannot do without. Throws ConfigError for a preset that does not exist, DeviceError.
nlohmann::ordered_json run_generate_bench(const GenerateBench& bench,
                                          const config::RunConfig& config);
std::string generate_bench_table(const nlohmann::ordered_json& result);

}  // namespace heddle::cli
