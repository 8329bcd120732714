#include "rl/generation.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "rollout/answers.h"

namespace heddle::rl {
namespace {

AdmissionOptions admission_options(const config::RlSection& rl) {
  return {.max_staleness = rl.staleness(),
          .groups_per_step = rl.groups_per_step,
          .max_inflight = rl.mode == config::RlMode::kAsync ? rl.max_inflight_groups : 0,
          .policy = rl.stale_policy == config::StalePolicy::kWait ? StalePolicy::kWait
                                                                  : StalePolicy::kDrop};
}

/// Adds the time of its life to a number of seconds.
class Timed {
 public:
  explicit Timed(double& seconds) : seconds_(seconds) {}
  ~Timed() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

Generation::Generation(const config::RunConfig& config, train::Setup& setup, const Prompts& prompts,
                       std::int64_t end)
    : config_(config),
      setup_(setup),
      prompts_(prompts),
      end_(end),
      judge_(config.rl.reward, setup.placed.context.mesh.world_group()),
      admission_(admission_options(config.rl)),
      stop_ids_(rollout::end_tokens(*setup.tokenizer, setup.placed.source.get())) {}

void Generation::make_engine() {
  engine_ = std::make_unique<rollout::Engine>(
      setup_.placed, setup_.tokenizer,
      rollout::EngineOptions{.max_sequences = config_.rollout.max_sequences,
                             .prefill_tokens = config_.rollout.prefill_tokens,
                             .capacity = config_.data.max_length});
  engine_->weights_changed(version());
}

std::vector<Group> Generation::next() {
  const Timed timed(counts_.seconds);
  if (!engine_) make_engine();
  std::optional<Admission::Batch> batch;
  while (true) {
    dispatch();
    const bool no_more = next_cursor_ >= end_ && again_.empty();
    batch = admission_.cut(no_more);
    if (batch) break;
    if (running_.empty() && no_more) return {};
    advance();
  }
  for (const std::int64_t cursor : batch->dropped) {
    ++counts_.stale;
    abort(cursor);
  }
  if (config_.rl.update_mode == config::UpdateMode::kWait) {
    while (!running_.empty()) advance();
  } else if (config_.rl.update_mode == config::UpdateMode::kAbort) {
    std::vector<std::int64_t> cursors;
    for (const auto& [cursor, running] : running_) cursors.push_back(cursor);
    for (const std::int64_t cursor : cursors) {
      admission_.forget(cursor);
      abort(cursor);
    }
  }
  generated_since_cut_ = 0;
  std::sort(batch->cursors.begin(), batch->cursors.end());
  std::vector<Group> groups;
  for (const std::int64_t cursor : batch->cursors) {
    groups.push_back(std::move(finished_.at(cursor)));
    finished_.erase(cursor);
  }
  return groups;
}

void Generation::updated() {
  for (const std::int64_t cursor : admission_.publish()) {
    ++counts_.stale;
    const auto finished = finished_.find(cursor);
    if (finished == finished_.end()) {
      abort(cursor);
    } else {
      again_[cursor] = finished->second.attempt + 1;
      finished_.erase(finished);
    }
  }
  // At once, so that nobody reads the engine's gathered copies of old weights.
  if (engine_) engine_->weights_changed(version());
}

void Generation::dispatch() {
  while (admission_.capacity() > 0) {
    if (!again_.empty()) {
      const auto [cursor, attempt] = *again_.begin();
      again_.erase(again_.begin());
      start(cursor, attempt);
    } else if (next_cursor_ < end_) {
      start(next_cursor_++, 0);
    } else {
      return;
    }
  }
}

void Generation::start(std::int64_t cursor, std::int64_t attempt) {
  admission_.start(cursor, version());
  Running& running = running_[cursor];
  running.group = {.cursor = cursor, .attempt = attempt, .row = prompts_.index_of(cursor)};
  const auto samples = static_cast<std::size_t>(config_.rl.samples_per_group);
  running.group.trajectories.resize(samples);
  const std::uint64_t stream = rollout::seed_of_row(
      rollout::seed_of_row(config_.train.seed, static_cast<std::uint64_t>(cursor)),
      static_cast<std::uint64_t>(attempt));
  rollout::Request request;
  request.prompt = prompts_.row(running.group.row).tokens;
  request.max_new_tokens = config_.rollout.max_new_tokens;
  request.sampling.seed = stream;
  request.stop_ids = stop_ids_;
  request.stop_strings = config_.rollout.stop;
  request.samples = config_.rl.samples_per_group;
  const rollout::RequestId first = engine_->submit(std::move(request));
  for (std::size_t i = 0; i < samples; ++i) {
    const rollout::RequestId id = first + static_cast<rollout::RequestId>(i);
    running.requests[id] = i;
    cursor_of_[id] = cursor;
  }
}

void Generation::advance() {
  std::set<std::int64_t> ended;
  for (rollout::Progress& progress : engine_->step()) {
    ++counts_.tokens;
    if (!progress.completion) continue;
    const std::int64_t cursor = cursor_of_.at(progress.id);
    cursor_of_.erase(progress.id);
    Running& running = running_.at(cursor);
    const std::size_t place = running.requests.at(progress.id);
    running.requests.erase(progress.id);
    take(running, place, std::move(*progress.completion));
    if (running.requests.empty()) ended.insert(cursor);
  }
  for (const std::int64_t cursor : ended) finish(cursor);
}

void Generation::take(Running& running, std::size_t place, rollout::Completion completion) {
  Trajectory& trajectory = running.group.trajectories[place];
  trajectory.tokens = std::move(completion.output_ids);
  trajectory.logprobs = std::move(completion.logprobs);
  trajectory.versions = std::move(completion.weights_versions);
  trajectory.text = std::move(completion.text);
  trajectory.is_truncated = completion.finish_reason == rollout::FinishReason::kLength;
}

void Generation::finish(std::int64_t cursor) {
  Group group = std::move(running_.at(cursor).group);
  running_.erase(cursor);
  ++counts_.groups;
  ++generated_since_cut_;
  std::string error;
  {
    const Timed timed(counts_.judging_s);
    error = judge_.judge(prompts_.row(group.row), group);
  }
  if (!error.empty()) {
    ++counts_.failed;
    log::warning("prompt {}: no reward ({}); the group is left out", cursor, error);
    admission_.forget(cursor);
    return;
  }
  if (group.is_uniform()) {
    ++(group.trajectories.front().reward > 0 ? counts_.all_right : counts_.all_wrong);
    if (may_filter()) {
      ++counts_.filtered;
      admission_.forget(cursor);
      return;
    }
  }
  if (admission_.finish(cursor, group.oldest_version())) {
    finished_.emplace(cursor, std::move(group));
  } else {
    ++counts_.stale;
    again_[cursor] = group.attempt + 1;
  }
}

bool Generation::may_filter() const {
  const config::RlSection& rl = config_.rl;
  return rl.dynamic_sampling && generated_since_cut_ < rl.max_attempts * rl.groups_per_step;
}

void Generation::abort(std::int64_t cursor) {
  const auto found = running_.find(cursor);
  for (const auto& [id, place] : found->second.requests) {
    engine_->abort(id);
    cursor_of_.erase(id);
  }
  again_[cursor] = found->second.group.attempt + 1;
  running_.erase(found);
}

nlohmann::json Generation::state() const {
  // Attempts begin again with the next number, as some of their tokens were seen already.
  std::map<std::int64_t, std::int64_t> again = again_;
  for (const auto& [cursor, running] : running_) again[cursor] = running.group.attempt + 1;
  for (const auto& [cursor, group] : finished_) again[cursor] = group.attempt + 1;
  nlohmann::json pending = nlohmann::json::array();
  for (const auto& [cursor, attempt] : again) pending.push_back({cursor, attempt});
  return {{"version", version()}, {"next_cursor", next_cursor_}, {"pending", pending}};
}

void Generation::restore(const nlohmann::json& state) {
  next_cursor_ = state.at("next_cursor").get<std::int64_t>();
  again_.clear();
  for (const auto& entry : state.at("pending"))
    again_[entry.at(0).get<std::int64_t>()] = entry.at(1).get<std::int64_t>();
  admission_.rebase(state.at("version").get<std::int64_t>(), 0);
}

}  // namespace heddle::rl
