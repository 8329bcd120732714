#include "schedule.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace heddle::rl::testing {

Schedule::Schedule(const Plan& plan, std::uint64_t seed, files::Path ledger)
    : plan_(plan), random_(seed, "schedule"), path_(std::move(ledger)) {
  ledger_ = std::make_unique<Ledger>(path_);
  admission_.emplace(plan_.admission);
  save();
}

bool Schedule::chance(double probability) { return random_.uniform(drawn_++) < probability; }

std::int64_t Schedule::length_of(std::int64_t cursor, std::int64_t attempt) const {
  const CounterRng law(17, "lengths");
  const double u = law.uniform(static_cast<std::uint64_t>(cursor * 1000 + attempt));
  // Pareto: half of the groups are short, a few take all the time there is.
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(1 / std::sqrt(1 - u)), 1,
                                  plan_.longest);
}

void Schedule::dispatch() {
  while (admission_->capacity() > 0) {
    const bool is_again = !again_.empty();
    const std::int64_t cursor = is_again ? *again_.begin() : ledger_->state().next_cursor;
    if (cursor == plan_.rows) return;
    again_.erase(cursor);
    const std::int64_t attempt = is_again ? ledger_->state().pending.at(cursor).attempt + 1 : 0;
    ledger_->dispatched({cursor, attempt, drawn_, rollout_version_});
    admission_->start(cursor, rollout_version_);
    running_[cursor] = {length_of(cursor, attempt), rollout_version_};
    outcome_.attempts = std::max(outcome_.attempts, attempt + 1);
  }
}

/// Another attempt, or none is left. The group is neither running nor queued.
void Schedule::issue_again(std::int64_t cursor, Rejection reason) {
  if (ledger_->state().pending.at(cursor).attempt + 1 < plan_.max_attempts) {
    again_.insert(cursor);
    return;
  }
  ledger_->rejected(cursor, reason, 0);
  outcome_.rejected.insert(cursor);
}

void Schedule::end(std::int64_t cursor) {
  const std::int64_t version = running_.at(cursor).version;
  running_.erase(cursor);
  if (chance(plan_.failing)) {
    admission_->forget(cursor);
    issue_again(cursor, Rejection::kFailed);
  } else if (!admission_->finish(cursor, version)) {
    issue_again(cursor, Rejection::kStale);
  } else if (ledger_->completed(cursor); chance(plan_.filtered)) {
    admission_->forget(cursor);
    ledger_->rejected(cursor, Rejection::kFiltered, 1);
    outcome_.rejected.insert(cursor);
  } else {
    queued_[cursor] = version;
  }
}

void Schedule::advance() {
  if (chance(plan_.pauses)) paused_until_ = tick_ + 5;
  if (tick_ < paused_until_) return;
  std::vector<std::int64_t> ended;
  for (auto& [cursor, group] : running_) {
    // Every group has its own pace, so they end in any order.
    if (chance(0.7) && --group.left <= 0) ended.push_back(cursor);
  }
  for (const std::int64_t cursor : ended) end(cursor);
}

void Schedule::lose_rollout() {
  std::vector<std::int64_t> lost;
  for (const auto& [cursor, group] : running_) lost.push_back(cursor);
  running_.clear();
  for (const std::int64_t cursor : lost) {
    admission_->forget(cursor);
    // An aborted prompt comes again however often: it is not the prompt that failed.
    again_.insert(cursor);
  }
}

void Schedule::train() {
  const bool no_more = ledger_->state().next_cursor == plan_.rows && again_.empty();
  const auto batch = admission_->cut(no_more);
  if (!batch) return;
  for (const std::int64_t cursor : batch->cursors) {
    const std::int64_t version = queued_.at(cursor);
    outcome_.max_staleness = std::max(outcome_.max_staleness, admission_->version() - version);
    ++outcome_.consumed[cursor];
    queued_.erase(cursor);
  }
  for (const std::int64_t cursor : batch->dropped) {
    running_.erase(cursor);
    issue_again(cursor, Rejection::kStale);
  }
  ledger_->consumed(++step_, batch->cursors);
  ledger_->commit();
  publish();
  if (step_ % plan_.steps_per_checkpoint == 0) save();
}

void Schedule::publish() {
  for (const std::int64_t cursor : admission_->publish()) {
    running_.erase(cursor);
    queued_.erase(cursor);
    issue_again(cursor, Rejection::kStale);
  }
  ledger_->published(admission_->version(), "");
  update_due_ = tick_ + plan_.update_delay;
}

void Schedule::save() {
  checkpoint_ = {ledger_->commit(), admission_->version(), queued_, outcome_};
}

/// The order of section "recovery": load, truncate, rebase, publish again, admit.
void Schedule::resume() {
  ledger_.reset();
  ledger_ = std::make_unique<Ledger>(path_, checkpoint_.offset);
  admission_->rebase(checkpoint_.version);
  step_ = ledger_->state().step;
  rollout_version_ = checkpoint_.version;
  update_due_ = -1;
  const std::int64_t worst = outcome_.max_staleness, attempts = outcome_.attempts;
  outcome_ = checkpoint_.outcome;
  outcome_.max_staleness = worst;
  outcome_.attempts = attempts;
  running_.clear();
  queued_.clear();
  again_.clear();
  for (const auto& [cursor, dispatch] : ledger_->state().pending) {
    const auto stored = checkpoint_.queued.find(cursor);
    if (stored != checkpoint_.queued.end() && admission_->restore(cursor, stored->second)) {
      queued_[cursor] = stored->second;
    } else {
      again_.insert(cursor);
    }
  }
}

Outcome Schedule::run() {
  const std::int64_t patience = 400 * (plan_.rows + 20);
  for (; tick_ < patience; ++tick_) {
    if (update_due_ >= 0 && tick_ >= update_due_) {
      rollout_version_ = admission_->version();
      update_due_ = -1;
      if (plan_.aborts_at_update) lose_rollout();
    }
    dispatch();
    advance();
    if (chance(plan_.rollout_dies)) lose_rollout();
    train();
    if (chance(plan_.trainer_dies)) resume();
    const LedgerState& state = ledger_->state();
    if (state.next_cursor == plan_.rows && state.pending.empty()) {
      outcome_.is_finished = true;
      break;
    }
  }
  ledger_->commit();
  return outcome_;
}

}  // namespace heddle::rl::testing
