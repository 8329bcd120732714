#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "bench/operator_cases.h"
#include "config/config.h"

namespace heddle::cli {

/// Settings of `heddle bench gdn|gemm|lora|attention|head|experts|adamw`.
struct OperatorBench {
  std::string work;
  std::string preset;  ///< May be empty for gdn: the published shapes, or some of them.
  bench::DeltaSelection published;
  bench::OperatorTokens tokens;
  bool check = false;  ///< gdn: errors against double instead of times.
};

/// Times, or errors with `check`. Throws ConfigError for shapes that do not exist, DeviceError.
nlohmann::ordered_json run_operator_bench(const OperatorBench& bench,
                                          const config::RunConfig& config);
std::string operator_bench_table(const nlohmann::ordered_json& result);

}  // namespace heddle::cli
