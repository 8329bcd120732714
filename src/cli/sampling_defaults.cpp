#include "cli/sampling_defaults.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "base/text.h"
#include "cli/option_checks.h"

namespace heddle::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFile = "generation_config.json";

/// Values that change what is sampled and that Heddle does not apply, with those that change
/// nothing.
const std::vector<std::pair<const char*, Json>>& without_effect() {
  static const std::vector<std::pair<const char*, Json>> values = {
      {"typical_p", 1.0},
      {"epsilon_cutoff", 0.0},
      {"eta_cutoff", 0.0},
      {"no_repeat_ngram_size", 0},
      {"num_beams", 1},
      {"penalty_alpha", 0.0},
      {"encoder_repetition_penalty", 1.0}};
  return values;
}

/// The defaults of one file.
class Defaults {
 public:
  explicit Defaults(const Json& json) : json_(json) {}

  template <class T>
  T take(const std::optional<T>& argument, const char* key, T otherwise) {
    const Json* const value = find(key);
    if (argument) return *argument;
    if (value == nullptr) return otherwise;
    if (!value->is_number())
      throw_error<ModelError>("{}: '{}' is {}: expected a number", kFile, key, value->dump());
    taken_.push_back(fmt::format("{} {}", key, value->dump()));
    return value->get<T>();
  }
  bool is_greedy() const {
    const Json* const value = find("do_sample");
    return value != nullptr && *value == false;
  }
  const Json* find(const char* key) const {
    if (!json_.is_object() || !json_.contains(key) || json_[key].is_null()) return nullptr;
    return &json_[key];
  }
  void note(std::string what) { taken_.push_back(std::move(what)); }

  void say() const {
    if (!taken_.empty()) log::info("sampling: {} ({})", text::join(taken_, ", "), kFile);
    std::vector<std::string> unused;
    for (const auto& [key, neutral] : without_effect()) {
      const Json* const value = find(key);
      if (value != nullptr && *value != neutral)
        unused.push_back(fmt::format("{} {}", key, value->dump()));
    }
    if (!unused.empty()) log::warning("{}: not used: {}", kFile, text::join(unused, ", "));
  }

 private:
  const Json& json_;
  std::vector<std::string> taken_;
};

template <class T>
void check(bool holds, const char* option, T value, const char* expected) {
  if (!holds) throw_error<ConfigError>("{} is {}: expected {}", option, value, expected);
}

}  // namespace

void add_sampling_arguments(CLI::App& command, SamplingArguments& arguments) {
  command.add_option("--temperature", arguments.temperature,
                     "0: the most likely token; default generation_config.json, else 1");
  command.add_option("--top-p", arguments.top_p,
                     "Smallest set with this probability; default likewise, else 1");
  command.add_option("--min-p", arguments.min_p,
                     "Least share of the most likely one's probability; default likewise, else 0");
  command.add_option("--top-k", arguments.top_k,
                     "The k most likely; 0: all; default likewise, else 0");
  command
      .add_option("--seed", arguments.seed, "Of the sampling; each answer has a stream of its own")
      ->check(seed_of_64_bits())
      ->capture_default_str();
}

void check(const SamplingArguments& arguments) {
  const double temperature = arguments.temperature.value_or(1), top_p = arguments.top_p.value_or(1),
               min_p = arguments.min_p.value_or(0);
  const std::int64_t top_k = arguments.top_k.value_or(0);
  check(std::isfinite(temperature) && temperature >= 0, "--temperature", temperature,
        "a number from 0 on");
  check(top_k >= 0, "--top-k", top_k, "a count, or 0 for all tokens");
  check(top_p > 0 && top_p <= 1, "--top-p", top_p, "a probability in (0, 1]");
  check(min_p >= 0 && min_p <= 1, "--min-p", min_p, "a probability from 0 to 1");
}

rollout::SamplingOptions sampling_of(const SamplingArguments& arguments, const Json& json) {
  rollout::SamplingOptions options;
  options.seed = arguments.seed;
  Defaults defaults(json);
  if (!arguments.temperature && defaults.is_greedy()) {
    options.temperature = 0;
    defaults.note("the most likely token (do_sample false)");
  } else {
    options.temperature = defaults.take(arguments.temperature, "temperature", options.temperature);
  }
  // Nothing else has an effect on the most likely token.
  if (options.temperature > 0) {
    options.top_p = defaults.take(arguments.top_p, "top_p", options.top_p);
    options.min_p = defaults.take(arguments.min_p, "min_p", options.min_p);
    options.top_k = defaults.take(arguments.top_k, "top_k", options.top_k);
  }
  options.repetition_penalty =
      defaults.take(std::optional<double>(), "repetition_penalty", options.repetition_penalty);
  defaults.say();
  const bool holds = std::isfinite(options.temperature) && options.temperature >= 0 &&
                     options.top_p > 0 && options.top_p <= 1 && options.min_p >= 0 &&
                     options.min_p <= 1 && options.top_k >= 0;
  if (!holds) {
    throw_error<ModelError>(
        "{}: temperature {}, top_p {} and top_k {} are used: expected a temperature from 0 on, "
        "top_p in (0, 1], top_k from 0 on",
        kFile, options.temperature, options.top_p, options.top_k);
  }
  return options;
}

}  // namespace heddle::cli
