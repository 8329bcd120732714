// Completions of data.eval.
#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "rl/steps.h"
#include "rl/turns.h"
#include "rollout/answers.h"
#include "rollout/engine.h"

namespace heddle::rl {
namespace {

/// The one trajectory of a group in evaluation.
constexpr std::size_t kOnly = 0;

/// `failed`: why prompts have no reward, as a program, a server or an environment failed. The mean
/// is that of the others. Throws Error where there are none.
void report_failures(const std::map<std::int64_t, std::string>& failed, const Prompts& prompts,
                     bool is_first_rank) {
  if (failed.empty()) return;
  const auto& [index, why] = *failed.begin();
  const std::string& place = prompts.row(index).place;
  if (std::ssize(failed) == prompts.size()) {
    throw_error<Error>("data.eval: none of the {} prompts has a reward; {}: {}", prompts.size(),
                       place, why);
  }
  if (is_first_rank) {
    log::warning("data.eval: {} of {} prompts have no reward and are left out of its means; {}: {}",
                 failed.size(), prompts.size(), place, why);
  }
}

}  // namespace

std::map<std::int64_t, std::string> Steps::open_episodes(std::vector<Group>& groups) {
  std::map<std::int64_t, std::string> failed;
  if (!judge_.has_episodes()) return failed;
  for (const Group& group : groups) {
    judge_.open(held_out_.row(group.row), group, kOnly,
                rollout::seed_of_row(config_.train.seed, static_cast<std::uint64_t>(group.row)));
  }
  for (const Verdict& verdict : judge_.take(/*waits=*/true)) {
    const reward::Score& score = verdict.score;
    try {
      if (score.error) throw_error<DataError>("{}", *score.error);
      const Json prompt = score.observation ? Json(*score.observation) : score.messages;
      if (!prompt.is_null()) {
        groups[static_cast<std::size_t>(verdict.cursor)].opening =
            held_out_.opening(verdict.cursor, prompt);
      }
    } catch (const DataError& error) {
      failed[verdict.cursor] = fmt::format("its episode does not begin: {}", error.what());
    }
  }
  return failed;
}

train::Evaluation Steps::evaluate() {
  std::vector<Group> groups(static_cast<std::size_t>(held_out_.size()));
  for (std::size_t i = 0; i < groups.size(); ++i) {
    groups[i].cursor = groups[i].row = static_cast<std::int64_t>(i);
    groups[i].trajectories.resize(1);
  }
  const Limits limits = limits_of(config_);
  std::map<std::int64_t, std::string> failed = open_episodes(groups);
  std::vector<std::size_t> active;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (!failed.contains(groups[i].row)) active.push_back(i);
  }
  while (!active.empty()) {
    std::vector<rollout::Request> requests;
    for (const std::size_t i : active) {
      const Trajectory& trajectory = groups[i].trajectories[0];
      rollout::Request request;
      request.prompt = context_of(trajectory, held_out_.tokens_of(groups[i]));
      request.max_new_tokens = std::min(limits.tokens - std::ssize(trajectory.tokens),
                                        limits.context - std::ssize(request.prompt));
      request.sampling.temperature = 0;
      request.stop_ids = rollout::end_tokens(*setup_.tokenizer, setup_.placed.source.get());
      request.stop_strings = config_.rollout.stop;
      requests.push_back(std::move(request));
    }
    std::vector<rollout::Completion> turns =
        rollout::generate(setup_.placed, setup_.tokenizer, requests,
                          {.max_sequences = config_.rollout.max_sequences,
                           .prefill_tokens = config_.rollout.prefill_tokens,
                           .record_steps = false,
                           .caches = config_.rollout.caches});
    for (std::size_t k = 0; k < active.size(); ++k) {
      Group& group = groups[active[k]];
      add_turn(group.trajectories[0], std::move(turns[k]), /*is_own_distribution=*/true);
      judge_.submit(held_out_.row(group.cursor), group, kOnly);
    }
    std::vector<std::size_t> go_on;
    for (const Verdict& verdict : judge_.take(/*waits=*/true)) {
      const reward::Score& score = verdict.score;
      // The reward that rl.reward.failed gives a lost episode in training is no result here.
      if (score.error || score.is_lost) {
        failed[verdict.cursor] = score.error.value_or("its episode was lost");
        continue;
      }
      const auto place = static_cast<std::size_t>(verdict.cursor);
      if (take_verdict(groups[place], verdict, held_out_, *setup_.tokenizer, limits))
        go_on.push_back(place);
    }
    active = std::move(go_on);
  }
  report_failures(failed, held_out_, is_first_rank());
  std::vector<double> rewards, lengths;
  for (const Group& group : groups) {
    if (judge_.has_episodes()) judge_.close(group);
    if (failed.contains(group.row)) continue;
    rewards.push_back(group.trajectories[0].reward);
    lengths.push_back(static_cast<double>(group.trajectories[0].sampled_tokens()));
  }
  const double reward = mean_of(rewards);
  train::Evaluation evaluation{0 - reward, {}};
  evaluation.metrics.set(metric::kReward, reward);
  evaluation.metrics.set(metric::kLength, mean_of(lengths));
  return evaluation;
}

}  // namespace heddle::rl
