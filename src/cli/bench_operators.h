#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "config/config.h"
#include "train/operator_cases.h"

namespace heddle::cli {

/// What `heddle bench gdn|gemm|attention|head|experts` times.
struct OperatorBench {
  std::string work;
  std::string preset;  ///< May be empty for gdn: the published shapes.
  train::OperatorTokens tokens;
  bool check = false;  ///< gdn: errors against double too.
};

/// Throws ConfigError for other work or a missing preset, DeviceError.
nlohmann::ordered_json run_operator_bench(const OperatorBench& bench,
                                          const config::RunConfig& config);
std::string operator_bench_table(const nlohmann::ordered_json& result);

}  // namespace heddle::cli
