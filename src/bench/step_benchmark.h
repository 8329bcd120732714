#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "bench/operator_cases.h"
#include "comm/world.h"
#include "config/run_config.h"

namespace heddle::bench {

/// Work that is timed: optimizer steps on random weights and tokens, without files.
struct Benchmark {
  std::string preset;                  ///< See models::preset.
  std::int64_t layers = 0;             ///< Only the first so many of the preset's; 0 for all.
  OperatorTokens tokens;               ///< Tokens of a micro-batch; other lengths in each.
  std::int64_t micro_batches = 1;      ///< Micro-batches of a step, on each data rank.
  std::int64_t steps = 6, warmup = 4;  ///< Timed, and before those.
  std::filesystem::path profile;       ///< Gets a profile of one more step, if not empty.
};

struct BenchmarkResult {
  std::string layout, device;
  std::vector<std::string> kernels;
  std::int64_t tokens = 0;                    ///< Tokens of a step, on all ranks.
  double median_s = 0, min_s = 0, max_s = 0;  ///< Time of a step.
  double tokens_per_s = 0, flops_per_s = 0;   ///< Of all ranks.
  std::int64_t peak_bytes = 0;                ///< Peak memory of this rank's device.
  double first_loss = 0, last_loss = 0;       ///< Mean over the tokens of the step.
};

/// All ranks of `world` (null for one) call it alike. Throws ConfigError, DeviceError, CommError.
BenchmarkResult run_benchmark(const Benchmark& benchmark, const config::RunConfig& config,
                              const std::shared_ptr<comm::World>& world);

}  // namespace heddle::bench
