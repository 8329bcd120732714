#include "rl/reward_options.h"

#include <utility>

#include "base/errors.h"
#include "base/json.h"
#include "config/config.h"

namespace heddle::rl {

reward::RewardOptions reward_options(const config::RlReward& section) {
  reward::RewardOptions options;
  for (const auto& [name, weight] : section.verifiers) {
    reward::Part part{.verifier = name, .weight = weight};
    if (const auto found = section.parameters.find(name); found != section.parameters.end())
      part.parameters = json::parse_as<ConfigError>(found->second, "rl.reward.parameters." + name);
    options.verifiers.push_back(std::move(part));
  }
  for (const auto& [name, text] : section.parameters) {
    if (!section.verifiers.contains(name))
      throw_error<ConfigError>("rl.reward.parameters.{}: rl.reward.verifiers has no '{}'", name,
                               name);
  }
  if (section.failed && !section.verifiers.empty()) {
    throw ConfigError(
        "rl.reward.failed: is for a program, a server or an environment (rl.reward.command, url, "
        "environment); "
        "verifiers judge every row that has what they compare with");
  }
  options.combine = section.combine;
  options.process.workers = section.workers;
  options.process.timeout_s = options.http.timeout_s = section.timeout_s;
  options.process.failed = options.http.failed = section.failed;
  options.process.memory_bytes = section.memory_bytes;
  options.process.cpu_seconds = section.cpu_seconds;
  options.environment = options.process;
  options.process.command = section.command;
  options.environment.key = "rl.reward.environment";
  options.environment.command = section.environment;
  options.http.url = section.url;
  options.http.token = section.token;
  options.http.batch = section.batch;
  options.http.concurrency = section.concurrency;
  options.http.retries = section.retries;
  options.http.backoff_s = section.backoff_s;
  return options;
}

void check_rewards(const config::RunConfig& config) {
  try {
    const reward::RewardOptions options = reward_options(config.rl.reward);
    if (!config.rl.reward.verifiers.empty()) reward::make_reward(options);
  } catch (const ConfigError& error) {
    const std::string why = error.what();
    if (why.starts_with("rl.reward.")) throw;
    throw ConfigError(config::where(config, "rl.reward.verifiers") + ": " + why);
  }
}

}  // namespace heddle::rl
