#include "rl/judge.h"

#include <fmt/format.h>

#include "base/json.h"
#include "comm/agreement.h"

namespace heddle::rl {
namespace {

reward::RewardOptions options_of(const config::RlReward& section) {
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
  options.combine = section.combine;
  options.process.command = section.command;
  options.process.workers = section.workers;
  options.process.timeout_s = options.http.timeout_s = section.timeout_s;
  options.http.url = section.url;
  options.http.token = section.token;
  return options;
}

}  // namespace

Judge::Judge(const config::RlReward& options, const comm::Group& everybody)
    : everybody_(everybody) {
  if (everybody_.rank() == 0) reward_ = reward::make_reward(options_of(options));
}

std::string Judge::judge(const Prompt& prompt, Group& group) {
  Json scores = Json::array();
  if (reward_) {
    std::vector<reward::Sample> samples;
    for (const Trajectory& trajectory : group.trajectories) {
      samples.push_back({.id = fmt::format("{}/{}/{}", group.cursor, group.attempt, samples.size()),
                         .group = group.cursor,
                         .prompt = prompt.text,
                         .completion = trajectory.text,
                         .tokens = {trajectory.tokens.begin(), trajectory.tokens.end()},
                         .truth = prompt.truth,
                         .meta = prompt.meta,
                         .is_truncated = trajectory.is_truncated});
    }
    for (const reward::Score& score : reward_->score(samples))
      scores.push_back({score.reward, Json(score.parts), score.error.value_or("")});
  }
  if (everybody_.size() > 1)
    scores = json::parse(everybody_.all_gather_objects(scores.dump()).front());
  std::string error;
  for (std::size_t i = 0; i < group.trajectories.size(); ++i) {
    group.trajectories[i].reward = scores[i][0].get<double>();
    group.trajectories[i].parts = scores[i][1].get<std::map<std::string, double>>();
    if (error.empty()) error = scores[i][2].get<std::string>();
  }
  return error;
}

}  // namespace heddle::rl
