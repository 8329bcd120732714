#include "rl/judge.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include "base/errors.h"
#include "base/json.h"
#include "reward/environment.h"
#include "reward/wire.h"

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
  if (section.failed && !section.verifiers.empty()) {
    throw ConfigError(
        "rl.reward.failed: is for a program or a server (rl.reward.command, rl.reward.url); "
        "verifiers judge every row that has what they compare with");
  }
  options.combine = section.combine;
  options.process.command = section.command;
  options.process.workers = section.workers;
  options.process.timeout_s = options.http.timeout_s = section.timeout_s;
  options.process.failed = options.http.failed = section.failed;
  options.process.memory_bytes = section.memory_bytes;
  options.process.cpu_seconds = section.cpu_seconds;
  options.http.url = section.url;
  options.http.token = section.token;
  options.http.batch = section.batch;
  options.http.concurrency = section.concurrency;
  options.http.retries = section.retries;
  options.http.backoff_s = section.backoff_s;
  return options;
}

/// The wait of one take(), after which all ranks meet again.
constexpr std::chrono::milliseconds kWait{50};

reward::Sample sample_of(const Prompt& prompt, const Group& group, std::size_t place) {
  const Trajectory& trajectory = group.trajectories[place];
  // The last turn's.
  std::size_t first = trajectory.tokens.size();
  while (first > 0 && trajectory.is_sampled(first - 1)) --first;
  std::vector<reward::PastTurn> turns;
  for (const Turn& turn : trajectory.turns) turns.push_back({turn.completion, turn.observation});
  return {.id = fmt::format("{}/{}/{}", group.cursor, group.attempt, place),
          .group = group.cursor,
          .prompt = prompt.text,
          .completion = trajectory.text,
          .turns = std::move(turns),
          .tokens = {trajectory.tokens.begin() + static_cast<std::ptrdiff_t>(first),
                     trajectory.tokens.end()},
          .truth = prompt.truth,
          .meta = prompt.meta,
          .is_truncated = trajectory.is_truncated};
}

Json to_json(const Verdict& v) {
  return {v.cursor,
          v.attempt,
          v.place,
          v.score.reward,
          Json(v.score.parts),
          v.score.error ? Json(*v.score.error) : Json(),
          v.score.observation ? Json(*v.score.observation) : Json()};
}

Verdict from_json(const Json& v) {
  Verdict verdict{v[0].get<std::int64_t>(), v[1].get<std::int64_t>(), v[2].get<std::size_t>()};
  verdict.score.reward = v[3].get<double>();
  verdict.score.parts = v[4].get<std::map<std::string, double>>();
  if (!v[5].is_null()) verdict.score.error = v[5].get<std::string>();
  if (!v[6].is_null()) verdict.score.observation = v[6].get<std::string>();
  return verdict;
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

Judge::Judge(const config::RlReward& section, bool in_order, const comm::Group& everybody)
    : everybody_(everybody),
      in_order_(in_order),
      answers_at_once_(in_order || !section.verifiers.empty()),
      may_answer_(answers_turns(section)) {
  if (everybody_.rank() != 0) return;
  const reward::RewardOptions options = options_of(section);
  if (!section.verifiers.empty()) {
    reward_ = reward::make_reward(options);
  } else {
    queue_ = std::make_unique<reward::ScoreQueue>(options);
  }
}

void Judge::submit(const Prompt& prompt, const Group& group, std::size_t place) {
  ++pending_;
  const Verdict asked{.cursor = group.cursor, .attempt = group.attempt, .place = place};
  if (reward_) {
    samples_.push_back(sample_of(prompt, group, place));
    asked_.push_back(asked);
  } else if (queue_) {
    under_way_[queue_->submit(sample_of(prompt, group, place))] = asked;
  }
}

std::vector<Verdict> Judge::scored(bool waits) {
  if (reward_) {
    std::vector<reward::Score> scores = reward_->score(samples_);
    for (std::size_t i = 0; i < asked_.size(); ++i) asked_[i].score = std::move(scores[i]);
    samples_.clear();
    return std::exchange(asked_, {});
  }
  std::vector<Verdict> verdicts;
  for (reward::ScoreQueue::Scored& scored :
       queue_->take(waits ? kWait : std::chrono::milliseconds(0))) {
    const auto found = under_way_.find(scored.number);
    found->second.score = std::move(scored.score);
    verdicts.push_back(std::move(found->second));
    under_way_.erase(found);
  }
  return verdicts;
}

std::vector<Verdict> Judge::exchange(bool waits) {
  std::vector<Verdict> verdicts;
  if (everybody_.size() == 1) {
    verdicts = scored(waits);
  } else {
    Json answer;
    if (everybody_.rank() == 0) {
      try {
        answer["verdicts"] = Json::array();
        for (const Verdict& verdict : scored(waits)) answer["verdicts"].push_back(to_json(verdict));
      } catch (const Error& error) {
        answer = {{"failure", error.what()}};
      }
    }
    // Completions may hold bytes that are not UTF-8; verdicts quote them.
    answer = json::parse(everybody_.all_gather_objects(reward::wire_text(answer)).front());
    if (answer.contains("failure")) throw_error<Error>("{}", answer["failure"].get<std::string>());
    for (const Json& verdict : answer["verdicts"]) verdicts.push_back(from_json(verdict));
  }
  pending_ -= std::ssize(verdicts);
  return verdicts;
}

std::vector<Verdict> Judge::take(bool waits) {
  std::vector<Verdict> verdicts = exchange(waits || in_order_);
  if (!in_order_) return verdicts;
  while (pending_ > 0) std::ranges::move(exchange(true), std::back_inserter(verdicts));
  std::ranges::sort(verdicts, {}, [](const Verdict& v) { return std::pair(v.cursor, v.place); });
  return verdicts;
}

}  // namespace heddle::rl
