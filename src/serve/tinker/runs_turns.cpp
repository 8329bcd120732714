// Runs in turns on the model.
#include <algorithm>
#include <memory>
#include <utility>

#include "base/log.h"
#include "serve/tinker/runs.h"
#include "serve/tinker/work_outcome.h"

namespace heddle::serve::tinker {
namespace {

constexpr std::size_t kMostLosses = 300;  ///< Points of a run's curve.
constexpr double kLookAgainS = 0.001;     ///< For runs that are awaited.
constexpr double kLookAtPausesS = 0.25;
constexpr double kStoreAgainS = 1;  ///< Until a full disk may have room.

/// The work's exception as an outcome.
template <class Work>
Outcome guarded(const Work& work) {
  try {
    return work();
  } catch (const UserError& error) {
    return Outcome::failure(error.what(), "user");
  } catch (const HttpError& error) {
    return Outcome::failure(error.what(), "user");
  } catch (const DeviceError& error) {
    log::error("an operation on the model fails: {}", error.what());
    return Outcome::failure(error.what(), "server");
  } catch (const FileError& error) {
    log::error("an operation on the model fails: {}", error.what());
    return Outcome::failure(kFilesFail, "server");
  } catch (const std::exception& error) {
    log::error("an operation on the model fails: {}", error.what());
    return Outcome::failure("internal error of the server", "server");
  }
}

}  // namespace

tenants::SetId Runs::set_of(const Running& running) {
  if (!running.set)
    throw_error<DataError>("run {} has no weights: it could not be made", running.run);
  return *running.set;
}

bool Runs::is_ready(const Run& run) const {
  return !run.is_running && !run.is_closed && has_next(run) && !pause_of(run);
}

const Operation& Runs::next(const std::string& id) const {
  const Run& run = runs_.at(id);
  return run.waiting.at(run.next_seq);
}

std::vector<std::string> Runs::ready_runs() const {
  std::vector<std::string> ready;
  for (const auto& [id, run] : runs_) {
    if (is_ready(run)) ready.push_back(id);
  }
  const auto served = [this](const std::string& id) {
    const Run& run = runs_.at(id);
    const auto found = served_.find(run.tenant);
    return std::pair(found == served_.end() ? 0 : found->second, run.last_turn);
  };
  std::ranges::stable_sort(ready, {}, served);
  // Runs that train in step stay so; a run that only sends steps keeps nobody waiting.
  if (!was_step_) {
    std::ranges::stable_partition(
        ready, [this](const std::string& id) { return next(id).update.has_value(); });
  }
  return ready;
}

bool Runs::is_expected(const Run& run, double waited_s) const {
  const double idle_s = seconds_since(run.idle_since);
  return !run.is_running && !run.is_closed && run.waiting.empty() &&
         run.pause_s - idle_s <= join_s() - waited_s &&
         idle_s <= 1.5 * run.pause_s + options_.join_s / 4;
}

bool Runs::may_take_later(const std::unordered_set<std::string>& runs) const {
  const auto cannot_begin = [&](const std::string& id) {
    const auto found = runs_.find(id);
    return found != runs_.end() && !found->second.waiting.empty();
  };
  if (is_busy() || std::ranges::all_of(runs, cannot_begin)) return true;
  return std::ranges::any_of(runs_, [&](const auto& each) {
    return is_expected(each.second, 0) && !runs.contains(each.first);
  });
}

bool Runs::awaits_others() {
  std::int64_t tokens = 0;
  bool is_any_ready = false, is_step_ready = false, may_others_come = false;
  for (const auto& [id, run] : runs_) {
    if (!is_ready(run)) {
      may_others_come = may_others_come || !(run.is_closed || run.is_running);
      continue;
    }
    const Operation& operation = next(id);
    if (!operation.work && !operation.update) return false;  // nobody can share its turn
    is_any_ready = true;
    is_step_ready = is_step_ready || operation.update;
    tokens += operation.tokens;
  }
  if (is_any_ready && !waits_since_) waits_since_ = Clock::now();
  const double waited_s = waits_since_ ? seconds_since(*waits_since_) : 0;
  if (!is_any_ready || !may_others_come || tokens >= options_.pass_tokens) return false;
  if (waited_s < options_.join_s && seconds_since(last_arrival_) < options_.arrival_s) return true;
  if (waited_s >= join_s() || (is_step_ready && !was_step_)) return false;
  return std::ranges::any_of(runs_,
                             [&](const auto& each) { return is_expected(each.second, waited_s); });
}

void Runs::join() {
  if (is_busy() || is_draining_) return;
  if (awaits_others()) return join_after(kLookAgainS);
  pump();
}

void Runs::join_after(double seconds) {
  bool& is_due = seconds > 0 ? is_look_due_ : is_join_due_;
  if (is_due) return;
  is_due = true;
  const auto look = [this, &is_due] {
    is_due = false;
    join();
  };
  seconds > 0 ? server_.post_after(seconds, look) : server_.post(look);
}

void Runs::join_after_pauses() {
  if (is_pause_due_) return;
  std::optional<double> least;
  for (const auto& [id, run] : runs_) {
    if (run.is_running || run.is_closed || !has_next(run)) continue;
    const Operation& next = run.waiting.at(run.next_seq);
    if (!next.work || !next.meter) continue;
    if (const auto wait = next.meter->wait())
      least = std::min(least.value_or(wait->seconds), wait->seconds);
  }
  if (!least) return;
  is_pause_due_ = true;
  // Another tenant's pause may begin later and end before this one.
  server_.post_after(std::min(*least, kLookAtPausesS), [this] {
    is_pause_due_ = false;
    join();
  });
}

Runs::Running Runs::take(const std::string& id) {
  Run& run = runs_.at(id);
  auto node = run.waiting.extract(run.next_seq);
  run.is_running = true;
  run.last_turn = turns_;
  run.waiting_bytes -= node.mapped().bytes;
  Running running{id, std::move(node.mapped()), {}, run.set};
  // A tenant that comes back from a pause has no claim on the time it did not use.
  std::int64_t least = INT64_MAX;
  for (const auto& [other, each] : runs_)
    if (const auto found = served_.find(each.tenant); found != served_.end())
      least = std::min(least, found->second);
  auto& served = served_.try_emplace(run.tenant, least == INT64_MAX ? 0 : least).first->second;
  served += std::max<std::int64_t>(1, running.operation.tokens);
  if (const auto& meter = running.operation.meter; meter && running.operation.work)
    meter->add_tokens(
        running.operation.work->forward_only ? Meter::Tokens::kRead : Meter::Tokens::kTrained,
        running.operation.tokens);
  return running;
}

void Runs::pump() {
  if (is_busy() || is_draining_) return;
  const auto ready = ready_runs();
  if (ready.empty()) return join_after_pauses();
  is_busy_ = true;
  ++turns_;
  waits_since_.reset();
  auto batch = std::make_shared<std::vector<Running>>();
  batch->push_back(take(ready.front()));
  if (batch->front().operation.before) {
    Running& first = batch->front();
    first.outcome = guarded([&] {
      first.operation.before();
      return Outcome();
    });
    if (first.outcome.is_failed) return done(batch);
  }
  std::int64_t tokens = batch->front().operation.tokens;
  for (std::size_t i = 1; i < ready.size(); ++i) {
    const Operation& first = batch->front().operation;
    const Operation& other = next(ready[i]);
    const bool shares_pass =
        first.work && other.work && tokens + other.tokens <= options_.pass_tokens;
    const bool shares_step = first.update && other.update && !other.before;
    if (!shares_pass && !shares_step && !(first.is_short && other.is_short)) continue;
    tokens += other.tokens;
    batch->push_back(take(ready[i]));
  }
  was_step_ = batch->front().operation.update.has_value();
  const auto begun = Clock::now();
  const auto turn = [this, batch, begun](Backend& backend) {
    Running& first = batch->front();
    if (first.operation.work) {
      pass(backend, *batch);
    } else if (first.operation.make) {
      first.outcome = guarded([&] {
        const auto old = std::exchange(first.set, first.operation.make(backend));
        if (old) backend.remove(*old);
        return Outcome();
      });
    } else if (first.operation.update) {
      step(backend, *batch);
    } else {
      for (Running& running : *batch) {
        running.outcome = guarded([&] { return running.operation.act(backend, set_of(running)); });
      }
    }
    const double took_s = seconds_since(begun);
    if (options_.metrics) options_.metrics->turn(first.operation.kind, took_s);
    server_.post([this, batch, took_s] {
      if (batch->front().operation.work) pass_s_ = took_s;
      done(batch);
    });
  };
  model_.run(turn, tokens);
}

std::vector<Runs::Running*> Runs::with_sets(std::vector<Running>& batch) {
  std::vector<Running*> able;
  for (Running& running : batch) {
    running.outcome = guarded([&] {
      set_of(running);
      able.push_back(&running);
      return Outcome();
    });
  }
  return able;
}

void Runs::pass(Backend& backend, std::vector<Running>& batch) {
  const std::vector<Running*> passing = with_sets(batch);
  if (passing.empty()) return;
  std::vector<tenants::Work> works;
  for (Running* const running : passing) {
    works.push_back(std::move(*running->operation.work));
    works.back().set = *running->set;
  }
  Outcome failure = guarded([&] {
    const auto results = backend.forward_backward(works);
    for (std::size_t i = 0; i < passing.size(); ++i) {
      const auto loss = results[i].metrics.find("loss:sum");
      if (loss != results[i].metrics.end()) passing[i]->loss = loss->second;
      passing[i]->outcome = outcome_of(works[i], results[i]);
    }
    return Outcome();
  });
  if (!failure.is_failed) return;
  for (std::size_t i = 0; i < passing.size(); ++i) {
    passing[i]->outcome = failure;
    passing[i]->outcome.drops_gradients = !works[i].forward_only;
  }
}

void Runs::step(Backend& backend, std::vector<Running>& batch) {
  const std::vector<Running*> stepping = with_sets(batch);
  if (stepping.empty()) return;
  std::vector<tenants::SetUpdate> updates;
  for (const Running* const running : stepping)
    updates.push_back({*running->set, *running->operation.update});
  std::vector<tenants::StepResult> results;
  const Outcome failure = guarded([&] {
    results = backend.optim_steps(updates);
    return Outcome();
  });
  for (std::size_t i = 0; i < stepping.size(); ++i) {
    Running& running = *stepping[i];
    running.outcome = failure.is_failed ? failure : outcome_of(results[i]);
    if (!failure.is_failed && !results[i].warning.empty())
      log::warning("run {}: {}", running.run, results[i].warning);
    if (running.outcome.is_failed || !running.operation.act) continue;
    const Outcome after = guarded([&] { return running.operation.act(backend, *running.set); });
    if (after.is_failed) running.outcome = after;
  }
}

void Runs::note(Run& run, const Running& finished) const {
  if (finished.outcome.is_failed) return;
  Progress& progress = run.progress;
  if (finished.operation.kind == "forward_backward") {
    if (options_.metrics) options_.metrics->trained(run.tenant, finished.operation.tokens);
    progress.tokens += finished.operation.tokens;
    progress.loss_sum += finished.loss;
    progress.loss_tokens += finished.operation.tokens;
  } else if (finished.operation.kind == "optim_step") {
    if (options_.metrics) options_.metrics->stepped(run.tenant);
    ++progress.steps;
    if (progress.loss_tokens == 0) return;
    progress.losses.push_back(progress.loss_sum / static_cast<double>(progress.loss_tokens));
    if (progress.losses.size() > kMostLosses) progress.losses.pop_front();
    progress.loss_sum = 0;
    progress.loss_tokens = 0;
  }
}

void Runs::store(const std::shared_ptr<std::vector<Running>>& batch, std::function<void()> then) {
  std::vector<std::pair<std::string, const Outcome*>> outcomes;
  for (const Running& running : *batch)
    outcomes.emplace_back(running.operation.promise, &running.outcome);
  try {
    promises_.finish(outcomes, [&] {
      for (Running& running : *batch)
        if (running.operation.then) running.operation.then(running.outcome);
    });
  } catch (const FileError& error) {
    log::error("{}; outcomes wait until it takes them", error.what());
    server_.post_after(kStoreAgainS, [this, batch, then = std::move(then)] { store(batch, then); });
    return;
  }
  then();
}

void Runs::done(const std::shared_ptr<std::vector<Running>>& batch) {
  if (is_storing_) {  // the outcomes before these, again
    server_.post_after(kStoreAgainS / 10, [this, batch] { done(batch); });
    return;
  }
  const bool is_plain = std::ranges::none_of(*batch, [](const Running& running) {
    return running.operation.then || running.operation.after;
  });
  if (!is_plain) return store(batch, [this, batch] { go_on(*batch); });
  // The next turn is under way while the outcomes go to the disk; no other until they are there.
  go_on(*batch);
  is_storing_ = true;
  store(batch, [this] {
    is_storing_ = false;
    join();
  });
}

void Runs::go_on(std::vector<Running>& finished) {
  is_busy_ = false;
  for (Running& running : finished) {
    if (running.operation.after && !running.outcome.is_failed) {
      try {
        running.operation.after();
      } catch (const FileError& error) {
        log::error("{}; a restart runs more requests of run {} again", error.what(), running.run);
      }
    }
    const auto found = runs_.find(running.run);
    Run& run = found->second;
    note(run, running);
    run.set = running.set;
    run.is_running = false;
    run.next_seq = std::max(run.next_seq, running.operation.seq + 1);
    pass_refused(run);
    run.blocked_since = run.idle_since = Clock::now();
    if (run.is_closed) {
      if (run.set) release(*run.set);
      runs_.erase(found);  // join(), below, gives its place to another
    }
  }
  join();
}

}  // namespace heddle::serve::tinker
