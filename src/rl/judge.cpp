#include "rl/judge.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/json.h"
#include "comm/agreement.h"
#include "reward/environment.h"

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

/// A program and a server may; of verifiers those of tasks with several turns.
bool answers_turns(const config::RlReward& section) {
  if (!section.command.empty() || !section.url.empty()) return true;
  const std::vector<std::string> tasks = reward::task_names();
  return std::ranges::any_of(options_of(section).verifiers, [&](const reward::Part& part) {
    return std::ranges::find(tasks, part.verifier) != tasks.end() &&
           reward::make_task(part.verifier, part.parameters,
                             "rl.reward.parameters." + part.verifier)
               ->is_multi_turn();
  });
}

}  // namespace

Judge::Judge(const config::RlReward& options, const comm::Group& everybody)
    : everybody_(everybody), may_answer_(answers_turns(options)) {
  if (everybody_.rank() == 0) reward_ = reward::make_reward(options_of(options));
}

Verdict Judge::judge(const Prompt& prompt, Group& group, std::span<const std::size_t> places) {
  Json scores = Json::array();
  if (reward_) {
    std::vector<reward::Sample> samples;
    for (const std::size_t place : places) {
      const Trajectory& trajectory = group.trajectories[place];
      std::vector<std::int64_t> tokens;
      // The last turn's.
      std::size_t first = trajectory.tokens.size();
      while (first > 0 && trajectory.is_sampled(first - 1)) --first;
      tokens.assign(trajectory.tokens.begin() + static_cast<std::ptrdiff_t>(first),
                    trajectory.tokens.end());
      std::vector<reward::PastTurn> turns;
      for (const Turn& turn : trajectory.turns)
        turns.push_back({turn.completion, turn.observation});
      samples.push_back({.id = fmt::format("{}/{}/{}", group.cursor, group.attempt, place),
                         .group = group.cursor,
                         .prompt = prompt.text,
                         .completion = trajectory.text,
                         .turns = std::move(turns),
                         .tokens = std::move(tokens),
                         .truth = prompt.truth,
                         .meta = prompt.meta,
                         .is_truncated = trajectory.is_truncated});
    }
    for (const reward::Score& score : reward_->score(samples)) {
      scores.push_back({score.reward, Json(score.parts), score.error.value_or(""),
                        score.observation ? Json(*score.observation) : Json()});
    }
  }
  if (everybody_.size() > 1)
    scores = json::parse(everybody_.all_gather_objects(scores.dump()).front());
  Verdict verdict;
  for (std::size_t i = 0; i < places.size(); ++i) {
    Trajectory& trajectory = group.trajectories[places[i]];
    trajectory.reward += scores[i][0].get<double>();
    for (const auto& [name, value] : scores[i][1].items())
      trajectory.parts[name] += value.get<double>();
    if (verdict.error.empty()) verdict.error = scores[i][2].get<std::string>();
    if (!scores[i][3].is_null()) verdict.observations[places[i]] = scores[i][3].get<std::string>();
  }
  return verdict;
}

}  // namespace heddle::rl
