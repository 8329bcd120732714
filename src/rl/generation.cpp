#include "rl/generation.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "config/policy_versions.h"
#include "rl/published.h"
#include "rl/timed.h"
#include "rl/turns.h"
#include "rollout/answers.h"

namespace heddle::rl {
namespace {

AdmissionOptions admission_options(const config::RunConfig& config) {
  const config::RlSection& rl = config.rl;
  return {.max_staleness = config::staleness_of(config),
          .groups_per_batch = rl.groups_per_batch(),
          .max_inflight = rl.mode == config::RlMode::kAsync ? rl.max_inflight_groups : 0,
          .policy = rl.stale_policy,
          .in_order = rl.deterministic};
}

/// Programs and servers are asked for verdicts so often while tokens are drawn: ranks exchange
/// them.
constexpr std::int64_t kPassesPerLook = 8;
/// So many prompts in a row without a reward, or a batch of them, end the run.
constexpr std::int64_t kMostFailures = 8;

/// Epochs have an end, a number of steps takes what it needs.
std::int64_t end_of(const config::RunConfig& config, const Prompts& prompts) {
  return config.train.max_steps > 0 ? std::numeric_limits<std::int64_t>::max()
                                    : prompts.per_epoch() * config.train.epochs;
}

}  // namespace

Generation::Generation(const config::RunConfig& config, assembly::ModelOnRanks& model,
                       std::shared_ptr<const data::Tokenizer> tokenizer, const Prompts& prompts)
    : config_(config),
      model_(model),
      tokenizer_(std::move(tokenizer)),
      prompts_(prompts),
      end_(end_of(config, prompts)),
      judge_(config, *tokenizer_, config.rl.deterministic, model.context.mesh.world_group()),
      admission_(admission_options(config)),
      stop_ids_(rollout::end_tokens(*tokenizer_, model.source.get())) {}

rollout::Engine& Generation::engine() {
  if (!engine_) {
    rollout::CacheOptions caches = config_.rollout.caches;
    // Training has the other half.
    if (caches.memory_fraction == 0 && !config_.rl.is_disaggregated()) caches.memory_fraction = 0.5;
    rollout::EngineOptions options{.max_sequences = config_.rollout.max_sequences,
                                   .prefill_tokens = config_.rollout.prefill_tokens,
                                   .capacity = config_.data.max_length,
                                   .merge_adapter = config_.rollout.merge_adapter,
                                   .gather_weights = config_.rollout.gather_weights,
                                   .caches = std::move(caches)};
    // States of trajectories whose group is not judged yet, while others have all the slots.
    if (judge_.may_answer()) options.kept_states = options.max_sequences;
    engine_ = std::make_unique<rollout::Engine>(model_, tokenizer_, options);
    engine_->weights_changed(version());
    if (pins()) {
      slots_ = std::make_unique<rollout::AdapterSlots>(model_, *model_.adapters, "policy",
                                                       config::pinned_sets_of(config_));
      publish_adapters();
    }
  }
  return *engine_;
}

void Generation::publish_adapters() {
  auto* free = slots_->free_set(*engine_);
  while (free == nullptr) {
    pass();
    free = slots_->free_set(*engine_);
  }
  rollout::copy_factors(*model_.adapters, *free);
  if (model_.sharding) model_.sharding->publish(/*with_frozen=*/true);
  slots_->publish(*engine_, *free, version());
}

std::string Generation::weights_hash() {
  if (!hashed_) {
    hashed_ = std::make_unique<sync::Publisher>(
        model_.context.mesh.world_group(),
        sync::sent_parts(published(config_, model_), model_.context.mesh),
        sync::SyncOptions{.bucket_bytes = config_.sync.bucket_bytes,
                          .device = model_.context.device});
  }
  return hash_text(hashed_->manifest(), hashed_->weights_hash());
}

Batch Generation::next() {
  while (true) {
    if (std::optional<Batch> batch = try_next()) {
      prepare_update();
      if (engine_) engine_->release_weights();
      if (engine_ && config_.rollout.release_memory) engine_->release_memory();
      return *std::move(batch);
    }
    advance();
  }
}

std::optional<Batch> Generation::try_next() {
  dispatch();
  const bool no_more = next_cursor_ >= end_ && again_.empty();
  const std::optional<Admission::Batch> cut = admission_.cut(no_more);
  if (!cut && !(running_.empty() && no_more)) return std::nullopt;
  for (const std::int64_t cursor : cut ? cut->dropped : std::vector<std::int64_t>()) {
    give_up(abort(cursor));
  }
  if (engine_) news_.counts.engine += engine_->take_counts();
  Batch batch = std::exchange(news_, {});
  const auto now = std::chrono::steady_clock::now();
  batch.counts.running = admission_.running();
  batch.counts.queued = admission_.queued();
  if (config_.rl.max_inflight_groups > 0) batch.counts.capacity = admission_.room();
  batch.counts.elapsed_s = std::chrono::duration<double>(now - last_batch_).count();
  last_batch_ = now;
  if (cut) {
    std::vector<std::int64_t> cursors = cut->cursors;
    std::sort(cursors.begin(), cursors.end());
    double waited_s = 0;
    for (const std::int64_t cursor : cursors) {
      Finished& finished = finished_.at(cursor);
      waited_s += std::chrono::duration<double>(now - finished.at).count();
      batch.groups.push_back(std::move(finished.group));
      finished_.erase(cursor);
    }
    batch.counts.queue_age_s = waited_s / static_cast<double>(cursors.size());
  }
  batch.state = state();
  return batch;
}

bool Generation::advance() {
  dispatch();
  if (running_.empty()) return false;
  pass();
  return true;
}

bool Generation::advance_before_update() {
  // The deterministic mode starts all that the old weights may generate, see prepare_update().
  if (config_.rl.update_mode != config::UpdateMode::kWait || config_.rl.deterministic)
    return advance();
  if (running_.empty()) return false;
  pass();
  return true;
}

void Generation::prepare_update() {
  if (config_.rl.update_mode == config::UpdateMode::kWait) {
    if (config_.rl.deterministic) {
      while (advance()) continue;
    }
    while (!running_.empty()) pass();
  } else if (config_.rl.update_mode == config::UpdateMode::kAbort) {
    std::vector<std::int64_t> cursors;
    for (const auto& [cursor, running] : running_) cursors.push_back(cursor);
    for (const std::int64_t cursor : cursors) {
      admission_.forget(cursor);
      issue_again(abort(cursor));
    }
  }
}

void Generation::updated() {
  for (const std::int64_t cursor : admission_.publish()) {
    const auto finished = finished_.find(cursor);
    if (finished == finished_.end()) {
      give_up(abort(cursor));
    } else {
      const Group& group = finished->second.group;
      give_up({cursor, group.attempt, group.sampled_tokens()});
      finished_.erase(finished);
    }
  }
  generated_ = 0;
  weights_changed();
}

void Generation::weights_changed() {
  if (pins()) {
    if (engine_) publish_adapters();
    return;
  }
  const bool keeps = config_.rl.update_mode == config::UpdateMode::kKeep;
  if (engine_) {
    engine_->weights_changed(
        version(), keeps ? rollout::LiveSequences::kKeep : rollout::LiveSequences::kRecompute);
  }
}

void Generation::dispatch() {
  const Timed timed(news_.counts.seconds);
  while (admission_.capacity() > 0 && has_use_for_more()) {
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

bool Generation::has_use_for_more() const {
  if (admission_.running() < config_.rl.groups_per_batch()) return true;
  // Further ones than can run at a time would only grow old, or take memory where rl.max_staleness
  // sets no bound to speak of.
  std::int64_t waiting = engine_ ? engine_->queued().first : 0;
  if (judge_.has_episodes()) {
    for (const auto& [cursor, running] : running_) waiting += running.opening;
  }
  return waiting < config_.rollout.max_sequences;
}

std::uint64_t Generation::stream_of(const Group& group) const {
  return rollout::seed_of_row(
      rollout::seed_of_row(config_.train.seed, static_cast<std::uint64_t>(group.cursor)),
      static_cast<std::uint64_t>(group.attempt));
}

rollout::Request Generation::request(std::vector<std::int32_t> tokens, std::int64_t drawn) const {
  rollout::Request request;
  request.max_new_tokens = std::min(config_.rollout.max_new_tokens - drawn,
                                    config_.data.max_length - std::ssize(tokens));
  request.prompt = std::move(tokens);
  request.sampling.temperature = config_.rollout.temperature;
  request.sampling.top_p = config_.rollout.top_p;
  request.sampling.top_k = config_.rollout.top_k;
  request.sampling.min_p = config_.rollout.min_p;
  request.return_support = config_.rollout.has_cuts();
  request.return_experts = config_.rl.replays_generation();
  request.stop_ids = stop_ids_;
  request.stop_strings = config_.rollout.stop;
  return request;
}

void Generation::start(std::int64_t cursor, std::int64_t attempt) {
  admission_.start(cursor, version());
  Running& running = running_[cursor];
  running.group = {.cursor = cursor, .attempt = attempt, .row = prompts_.index_of(cursor)};
  const auto samples = static_cast<std::size_t>(config_.rl.samples_per_group);
  running.group.trajectories.resize(samples);
  const std::uint64_t stream = stream_of(running.group);
  news_.fates.push_back(
      {.kind = Fate::Kind::kDispatched, .dispatch = {cursor, attempt, stream, version()}});
  if (!judge_.has_episodes()) return begin(running);
  for (std::size_t i = 0; i < samples; ++i)
    judge_.open(prompts_.row(running.group.row), running.group, i, stream);
  running.opening = config_.rl.samples_per_group;
}

std::optional<std::string> Generation::open(Running& running, const reward::Score& score) {
  const Json prompt = score.observation ? Json(*score.observation) : score.messages;
  if (running.opening == config_.rl.samples_per_group) running.prompt = prompt;
  if (running.prompt != prompt) {
    return "its episodes begin with different prompts; op reset may go by the seed and the row "
           "alone";
  }
  if (--running.opening > 0 || prompt.is_null()) return {};
  try {
    running.group.opening = prompts_.opening(running.group.row, prompt);
  } catch (const DataError& error) {
    return fmt::format("the prompt of its episodes: {}", error.what());
  }
  return {};
}

void Generation::begin(Running& running) {
  rollout::Request request = this->request(prompts_.tokens_of(running.group), 0);
  request.sampling.seed = stream_of(running.group);
  request.samples = config_.rl.samples_per_group;
  if (judge_.may_answer()) {
    running.conversation = std::exchange(next_conversation_, next_conversation_ + request.samples);
    request.conversation = running.conversation;
  }
  const rollout::RequestId first = engine().submit(std::move(request));
  for (std::size_t i = 0; i < running.group.trajectories.size(); ++i) {
    const rollout::RequestId id = first + static_cast<rollout::RequestId>(i);
    running.requests[id] = i;
    cursor_of_[id] = running.group.cursor;
  }
}

void Generation::pass() {
  const Timed timed(news_.counts.seconds);
  ++passes_;
  if (!cursor_of_.empty()) {
    for (rollout::Progress& progress : engine().step()) {
      ++news_.counts.tokens;
      if (!progress.completion) continue;
      const std::int64_t cursor = cursor_of_.at(progress.id);
      cursor_of_.erase(progress.id);
      Running& running = running_.at(cursor);
      const std::size_t place = running.requests.at(progress.id);
      running.requests.erase(progress.id);
      take(running, place, std::move(*progress.completion));
    }
  }
  take_verdicts();
}

void Generation::take(Running& running, std::size_t place, rollout::Completion completion) {
  // The anchor is the distribution that tokens were drawn from.
  const bool is_own = config_.rollout.temperature == 1 && !config_.rollout.has_cuts();
  const std::int64_t version = pins() ? completion.adapter_version : -1;
  news_.counts.prefill_saved += completion.cached_tokens;
  add_turn(running.group.trajectories[place], std::move(completion), is_own, version);
  judge_.submit(prompts_.row(running.group.row), running.group, place);
  ++running.judged;
}

void Generation::take_verdicts() {
  if (judge_.pending() == 0) return;
  const bool is_idle = cursor_of_.empty();
  if (!is_idle && !judge_.answers_at_once() && passes_ % kPassesPerLook != 0) return;
  const Timed timed(news_.counts.judging_s);
  for (Verdict& verdict : judge_.take(is_idle)) settle(std::move(verdict));
}

void Generation::settle(Verdict verdict) {
  const auto found = running_.find(verdict.cursor);
  // An aborted group is judged for nothing.
  if (found == running_.end() || found->second.group.attempt != verdict.attempt) return;
  Running& running = found->second;
  reward::Score& score = verdict.score;
  if (score.is_lost && play_anew(running)) return;
  if (verdict.is_opening) {
    if (!score.error) score.error = open(running, score);
  } else {
    --running.judged;
  }
  bool goes_on = false;
  if (!verdict.is_opening && !score.error) {
    try {
      goes_on = take_verdict(running.group, verdict, prompts_, *tokenizer_, limits_of(config_));
    } catch (const DataError& error) {
      score.error = error.what();
    }
  }
  if (score.error) {
    for (const auto& [id, place] : running.requests) {
      engine_->abort(id);
      cursor_of_.erase(id);
    }
    return finish(verdict.cursor, score.error);
  }
  if (verdict.is_opening) return running.opening == 0 ? begin(running) : void();
  if (goes_on) begin_turn(running, verdict.place);
  if (running.requests.empty() && running.judged == 0) finish(verdict.cursor);
}

bool Generation::play_anew(const Running& running) {
  const std::int64_t cursor = running.group.cursor, attempt = running.group.attempt;
  if (attempt + 1 >= config_.rl.stale_attempts) return false;
  admission_.forget(cursor);
  issue_again(abort(cursor));
  return true;
}

void Generation::begin_turn(Running& running, std::size_t place) {
  Group& group = running.group;
  const Trajectory& trajectory = group.trajectories[place];
  rollout::Request request = this->request(context_of(trajectory, prompts_.tokens_of(group)),
                                           std::ssize(trajectory.tokens));
  // Positions begin with 0 in each turn, so that each has a stream of its own.
  request.sampling.seed =
      rollout::seed_of_row(rollout::seed_of_sample(stream_of(group), place),
                           static_cast<std::uint64_t>(std::ssize(trajectory.turns)));
  // Goes on from the state at the end of the turn before, if it is still there.
  if (running.conversation >= 0)
    request.conversation = running.conversation + static_cast<std::int64_t>(place);
  const rollout::RequestId id = engine().submit(std::move(request));
  running.requests[id] = place;
  cursor_of_[id] = group.cursor;
}

void Generation::finish(std::int64_t cursor, const std::optional<std::string>& error) {
  GenerationCounts& counts = news_.counts;
  Running& running = running_.at(cursor);
  end_episodes(running);
  Group group = std::move(running.group);
  running_.erase(cursor);
  ++counts.groups;
  ++generated_;
  news_.fates.push_back({.kind = Fate::Kind::kCompleted, .dispatch = {.cursor = cursor}});
  const auto reject = [&](Rejection reason) {
    admission_.forget(cursor);
    news_.fates.push_back({.kind = Fate::Kind::kRejected,
                           .dispatch = {.cursor = cursor},
                           .reason = reason,
                           .tokens = group.sampled_tokens()});
  };
  if (error) {
    ++counts.failed;
    counts.failed_tokens += group.sampled_tokens();
    if (++failed_in_a_row_ >= std::max(kMostFailures, config_.rl.groups_per_batch())) {
      throw_error<Error>("rl.reward: none of the last {} prompts could be judged; the last one: {}",
                         failed_in_a_row_, *error);
    }
    log::warning("{}: no reward ({}); the group is left out", prompts_.row(group.row).place,
                 *error);
    reject(Rejection::kFailed);
    return;
  }
  failed_in_a_row_ = 0;
  if (group.is_uniform()) {
    ++(group.trajectories.front().reward > 0 ? counts.all_right : counts.all_wrong);
    if (may_filter()) {
      ++counts.filtered;
      counts.filtered_tokens += group.sampled_tokens();
      reject(Rejection::kFiltered);
      return;
    }
  }
  if (admission_.finish(cursor, group.oldest_version())) {
    finished_.emplace(cursor, Finished{std::move(group), std::chrono::steady_clock::now()});
  } else {
    give_up({cursor, group.attempt, group.sampled_tokens()});
  }
}

void Generation::end_episodes(const Running& running) {
  if (judge_.has_episodes()) judge_.close(running.group);
  if (running.conversation < 0) return;
  for (std::size_t place = 0; place < running.group.trajectories.size(); ++place)
    engine().end_conversation(running.conversation + static_cast<std::int64_t>(place));
}

bool Generation::may_filter() const {
  const config::RlSection& rl = config_.rl;
  return rl.dynamic_sampling && generated_ < rl.max_attempts * rl.groups_per_batch();
}

Generation::Tried Generation::abort(std::int64_t cursor) {
  const auto found = running_.find(cursor);
  const Group& group = found->second.group;
  Tried tried{cursor, group.attempt, group.sampled_tokens()};
  for (const auto& [id, place] : found->second.requests) {
    tried.tokens += std::ssize(engine_->abort(id).output_ids);
    cursor_of_.erase(id);
  }
  end_episodes(found->second);
  running_.erase(found);
  return tried;
}

void Generation::give_up(const Tried& group) {
  ++news_.counts.stale;
  news_.counts.stale_tokens += group.tokens;
  if (group.attempt + 1 < config_.rl.stale_attempts) return issue_again(group);
  if (is_first_rank()) {
    log::warning(
        "{}: the prompt's completions get older than rl.max_staleness {} and are dropped, the last "
        "of {} attempts (rl.stale_attempts) after {} tokens; the prompt is left out. To train "
        "on it raise rl.max_staleness, set rl.stale_policy wait, or lower rollout.max_new_tokens",
        prompts_.row(prompts_.index_of(group.cursor)).place, config_.rl.staleness(),
        config_.rl.stale_attempts, group.tokens);
  }
  news_.fates.push_back({.kind = Fate::Kind::kRejected,
                         .dispatch = {.cursor = group.cursor},
                         .reason = Rejection::kStale,
                         .tokens = group.tokens});
}

}  // namespace heddle::rl
