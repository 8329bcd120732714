#include "rl/judge.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include "base/errors.h"
#include "base/json.h"
#include "base/log.h"
#include "reward/environment.h"
#include "reward/wire.h"
#include "rl/reward_options.h"

namespace heddle::rl {
namespace {

/// The wait of one take(), after which all ranks meet again.
constexpr std::chrono::milliseconds kWait{50};

std::string id_of(const Group& group, std::size_t place) {
  return fmt::format("{}/{}/{}", group.cursor, group.attempt, place);
}

Json to_json(const Verdict& v) {
  return {v.cursor,
          v.attempt,
          v.place,
          v.score.reward,
          Json(v.score.parts),
          v.score.error ? Json(*v.score.error) : Json(),
          v.score.observation ? Json(*v.score.observation) : Json(),
          v.score.messages,
          v.score.is_truncated,
          v.is_opening,
          v.messages,
          v.score.is_lost};
}

Verdict from_json(const Json& v) {
  Verdict verdict{v[0].get<std::int64_t>(), v[1].get<std::int64_t>(), v[2].get<std::size_t>()};
  verdict.score.reward = v[3].get<double>();
  verdict.score.parts = v[4].get<std::map<std::string, double>>();
  if (!v[5].is_null()) verdict.score.error = v[5].get<std::string>();
  if (!v[6].is_null()) verdict.score.observation = v[6].get<std::string>();
  verdict.score.messages = v[7];
  verdict.score.is_truncated = v[8].get<bool>();
  verdict.is_opening = v[9].get<bool>();
  verdict.messages = v[10];
  verdict.score.is_lost = v[11].get<bool>();
  return verdict;
}

/// A program, a server and an environment may; of verifiers those of tasks with several turns.
bool answers_turns(const config::RlReward& section) {
  if (section.verifiers.empty()) return true;
  const std::vector<std::string> tasks = reward::task_names();
  return std::ranges::any_of(reward_options(section).verifiers, [&](const reward::Part& part) {
    return std::ranges::find(tasks, part.verifier) != tasks.end() &&
           reward::make_task(part.verifier, part.parameters,
                             "rl.reward.parameters." + part.verifier)
               ->is_multi_turn();
  });
}

}  // namespace

Judge::Judge(const config::RunConfig& config, const data::Tokenizer& tokenizer, bool in_order,
             const comm::Group& everybody)
    : everybody_(everybody),
      in_order_(in_order),
      answers_at_once_(in_order || !config.rl.reward.verifiers.empty()),
      may_answer_(answers_turns(config.rl.reward)),
      has_episodes_(!config.rl.reward.environment.empty()),
      renders_history_(config.rl.history == config::History::kRender) {
  if (everybody_.rank() != 0) return;
  const config::RlReward& section = config.rl.reward;
  const reward::RewardOptions options = reward_options(section);
  if (may_answer_ && section.verifiers.empty())
    dialogue_ = std::make_unique<Dialogue>(config, tokenizer);
  if (!section.verifiers.empty()) {
    reward_ = reward::make_reward(options);
  } else {
    queue_ = std::make_unique<reward::ScoreQueue>(options);
  }
}

void Judge::ask(reward::Sample sample, const Verdict& asked) {
  if (reward_) {
    samples_.push_back(std::move(sample));
    asked_.push_back(asked);
  } else if (queue_) {
    under_way_[queue_->submit(std::move(sample))] = asked;
  }
}

reward::Sample Judge::sample_of(const Prompt& prompt, const Group& group, std::size_t place) const {
  const Trajectory& trajectory = group.trajectories[place];
  // The last turn's.
  std::size_t first = trajectory.tokens.size();
  const std::size_t fork =
      trajectory.forks.empty() ? 0 : static_cast<std::size_t>(trajectory.forks.back().first);
  while (first > fork && trajectory.is_sampled(first - 1)) --first;
  std::vector<reward::PastTurn> turns;
  for (const Turn& turn : trajectory.turns) turns.push_back({turn.completion, turn.observation});
  const std::string& text = group.opening ? group.opening->text : prompt.text;
  const std::string& before = turns.empty() ? text : turns.back().observation;
  Json message = nullptr;
  if (dialogue_) message = dialogue_->message(trajectory.text, before, prompt.tools);
  return {.id = id_of(group, place),
          .place = prompt.place,
          .group = group.cursor,
          .prompt = text,
          .completion = trajectory.text,
          .turns = std::move(turns),
          .tokens = {trajectory.tokens.begin() + static_cast<std::ptrdiff_t>(first),
                     trajectory.tokens.end()},
          .truth = prompt.truth,
          .meta = prompt.meta,
          .message = std::move(message),
          .is_truncated = trajectory.is_truncated};
}

void Judge::submit(const Prompt& prompt, const Group& group, std::size_t place) {
  ++pending_;
  if (everybody_.rank() != 0) return;
  const std::vector<std::int32_t>& tokens = group.trajectories[place].tokens;
  reward::Sample sample = sample_of(prompt, group, place);
  Verdict asked{.cursor = group.cursor,
                .attempt = group.attempt,
                .place = place,
                .last = tokens.empty() ? -1 : tokens.back()};
  if (renders_history_) {
    asked.messages.push_back(sample.message.is_null()
                                 ? Json{{"role", "assistant"}, {"content", sample.completion}}
                                 : sample.message);
  }
  ask(std::move(sample), asked);
}

void Judge::open(const Prompt& prompt, const Group& group, std::size_t place, std::uint64_t seed) {
  ++pending_;
  if (everybody_.rank() != 0) return;
  ask({.id = id_of(group, place),
       .place = prompt.place,
       .group = group.cursor,
       .prompt = prompt.text,
       .truth = prompt.truth,
       .meta = prompt.meta,
       .ask = reward::Ask::kOpening,
       .seed = seed},
      {.cursor = group.cursor, .attempt = group.attempt, .place = place, .is_opening = true});
}

void Judge::close(const Group& group) {
  if (!queue_) return;
  for (std::size_t place = 0; place < group.trajectories.size(); ++place)
    queue_->submit({.id = id_of(group, place), .ask = reward::Ask::kClosing});
}

void Judge::render(Verdict& verdict) const {
  reward::Score& score = verdict.score;
  if (verdict.is_opening) return;
  if (renders_history_ && score.observation) {
    score.error =
        "'observation' is a text, and rl.history render renders messages: expected 'messages'";
  }
  if (score.messages.is_null()) return;
  if (renders_history_ && score.messages.is_array()) {
    for (const Json& message : score.messages) verdict.messages.push_back(message);
  }
  try {
    score.observation = dialogue_->reply(std::exchange(score.messages, nullptr), verdict.last);
  } catch (const DataError& error) {
    score.error = fmt::format("'messages': {}", error.what());
  }
}

void Judge::name_unread(const reward::Score& score) {
  constexpr std::size_t kMost = 32;  // a program may make keys up
  for (const std::string& key : score.unread) {
    if (unread_.size() < kMost && unread_.insert(key).second)
      log::info("rl.reward: answers have '{}', which nothing reads (docs/rewards.md)", key);
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
    name_unread(found->second.score);
    render(found->second);
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
      } catch (const ConfigError& error) {
        answer = {{"wrong", error.what()}};
      } catch (const Error& error) {
        answer = {{"failure", error.what()}};
      }
    }
    // Completions may hold bytes that are not UTF-8; verdicts quote them.
    // Messages in it may be as deep as a text of their own.
    answer = json::parse(everybody_.all_gather_objects(reward::wire_text(answer)).front(),
                         {.depth = 512});
    // The exit status tells a program that cannot be started from one that fails, on all ranks.
    if (answer.contains("wrong"))
      throw_error<ConfigError>("{}", answer["wrong"].get<std::string>());
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
