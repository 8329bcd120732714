#include "reward/reward.h"

#include "base/errors.h"
#include "reward/composite.h"
#include "reward/environment_reward.h"
#include "reward/http_reward.h"
#include "reward/process_reward.h"

namespace heddle::reward {

std::unique_ptr<Reward> make_reward(const RewardOptions& options) {
  const int sources = int{!options.verifiers.empty()} + int{!options.process.command.empty()} +
                      int{!options.http.url.empty()} + int{!options.environment.command.empty()};
  if (sources != 1) {
    throw_error<ConfigError>(
        "rl.reward: {} sources of rewards; expected exactly one of verifiers, command, url and "
        "environment",
        sources);
  }
  if (!options.process.command.empty()) return make_process_reward(options.process);
  if (!options.environment.command.empty()) return make_environment_reward(options.environment);
  if (!options.http.url.empty()) return make_http_reward(options.http);
  return make_composite(options.verifiers, options.combine);
}

}  // namespace heddle::reward
