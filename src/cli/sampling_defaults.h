#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "rollout/sampler.h"

namespace CLI {
class App;
}

namespace heddle::cli {

/// Sampling as the command line asks for it; what it leaves out comes from generation_config.json.
struct SamplingArguments {
  std::optional<double> temperature, top_p, min_p;
  std::optional<std::int64_t> top_k;
  std::uint64_t seed = 0;
};

/// Adds --temperature, --top-p, --min-p, --top-k and --seed.
void add_sampling_arguments(CLI::App& command, SamplingArguments& arguments);
/// Throws ConfigError that names the option whose value is out of range.
void check(const SamplingArguments& arguments);

/// The sampling that is used. do_sample false there is temperature 0. Says what was taken from
/// `generation_config` (null: there is none) and what of it is not used. Throws ModelError for a
/// value of the wrong kind or out of range.
rollout::SamplingOptions sampling_of(const SamplingArguments& arguments,
                                     const nlohmann::ordered_json& generation_config);

}  // namespace heddle::cli
