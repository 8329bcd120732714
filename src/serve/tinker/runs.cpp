#include "serve/tinker/runs.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/log.h"

namespace heddle::serve::tinker {
Runs::Runs(Server& server, ModelThread& model, Promises& promises, const Options& options)
    : server_(server), model_(model), promises_(promises), options_(options) {}

std::int64_t Runs::count(const std::string& tenant) const {
  return std::ranges::count_if(runs_,
                               [&](const auto& each) { return each.second.tenant == tenant; });
}

bool Runs::has_place(const Run& run) const {
  const std::int64_t most = run.waiting.at(run.next_seq).most_runs;
  if (most == 0 || run.set) return true;
  const auto made = std::ranges::count_if(runs_, [&](const auto& each) {
    return each.second.tenant == run.tenant && (each.second.set || each.second.is_running);
  });
  return made < most;
}

std::optional<QueueState> Runs::pause_of(const Run& run) const {
  const Operation& next = run.waiting.at(run.next_seq);
  if (!has_place(run))
    return QueueState{QueueState::Kind::kPausedCapacity,
                      fmt::format("{} training runs of this key's tenant are in memory, which is "
                                  "the limit: this one begins when a session is finished",
                                  next.most_runs)};
  if (!next.work || !next.meter) return std::nullopt;
  if (auto wait = next.meter->wait())
    return QueueState{QueueState::Kind::kPausedRateLimit, std::move(wait->reason)};
  return std::nullopt;
}

QueueState Runs::queue_state(const std::string& run) const {
  const auto found = runs_.find(run);
  if (found == runs_.end() || found->second.is_running || !has_next(found->second)) return {};
  return pause_of(found->second).value_or(QueueState());
}

std::int64_t Runs::waiting() const {
  std::int64_t count = 0;
  for (const auto& [id, run] : runs_) count += static_cast<std::int64_t>(run.waiting.size());
  return count;
}

std::vector<Runs::Status> Runs::status() const {
  std::vector<Status> all;
  for (const auto& [id, run] : runs_) {
    Status status{id, run.tenant, "idle"};
    if (run.is_running) {
      status.state = "running";
    } else if (is_ready(run)) {
      status.state = "queued";
    } else if (has_next(run)) {
      status.state = "paused: " + queue_state(id).reason;
    } else if (!run.waiting.empty()) {
      status.state = fmt::format("waits for request {}", run.next_seq);
    }
    status.waiting = static_cast<std::int64_t>(run.waiting.size());
    status.next_seq = run.next_seq;
    status.steps = run.progress.steps;
    status.tokens = run.progress.tokens;
    status.losses.assign(run.progress.losses.begin(), run.progress.losses.end());
    all.push_back(std::move(status));
  }
  return all;
}

void Runs::open(const std::string& run, const std::string& tenant, Operation first,
                std::int64_t first_seq) {
  Run& made = runs_[run];
  made.tenant = tenant;
  made.next_seq = first_seq - 1;
  first.seq = made.next_seq;
  made.waiting.emplace(first.seq, std::move(first));
  if (!is_busy_) last_arrival_ = Clock::now();
  join_after(0);
}

void Runs::check(const std::string& run, std::int64_t seq, std::size_t bytes) const {
  const auto found = runs_.find(run);
  if (found == runs_.end() || found->second.is_closed)
    throw_http(404,
               "training run {} is not in memory: its session ended, or the server was "
               "restarted; load its last checkpoint into a new run",
               run);
  const Run& entry = found->second;
  if (seq >= 0 && (seq < entry.next_seq || entry.waiting.contains(seq)))
    throw_http(409, "seq_id {} of run {} has had its turn; the next one is {}", seq, run,
               entry.next_seq);
  if (entry.waiting_bytes + bytes > options_.most_waiting_bytes ||
      static_cast<std::int64_t>(entry.waiting.size()) >= options_.most_waiting)
    throw HttpError(429,
                    fmt::format("{} requests with {} bytes of run {} wait: {} and {} are allowed",
                                entry.waiting.size(), entry.waiting_bytes, run,
                                options_.most_waiting, options_.most_waiting_bytes),
                    1);
}

void Runs::add(const std::string& run, Operation operation) {
  Run& entry = runs_.at(run);
  if (operation.seq < 0)
    operation.seq = entry.waiting.empty() ? entry.next_seq + (entry.is_running ? 1 : 0)
                                          : entry.waiting.rbegin()->first + 1;
  if (entry.waiting.empty()) {
    entry.blocked_since = Clock::now();
    if (!entry.is_running) entry.pause_s = seconds_since(entry.idle_since);
  }
  entry.waiting_bytes += operation.bytes;
  entry.refused.erase(operation.seq);
  entry.waiting.emplace(operation.seq, std::move(operation));
  pass_refused(entry);
  if (!is_busy_) last_arrival_ = Clock::now();
  join_after(0);
}

bool Runs::refuse(const std::string& run, std::int64_t seq) {
  const auto found = runs_.find(run);
  if (found == runs_.end()) return false;
  Run& entry = found->second;
  const std::int64_t next = entry.next_seq + (entry.is_running ? 1 : 0);
  if (seq < next || entry.waiting.contains(seq) ||
      std::ssize(entry.refused) >= options_.most_waiting)
    return false;
  entry.refused.insert(seq);
  pass_refused(entry);
  if (!is_busy_) last_arrival_ = Clock::now();
  join_after(0);
  return true;
}

void Runs::pass_refused(Run& run) {
  if (run.is_running) return;
  run.refused.erase(run.refused.begin(), run.refused.lower_bound(run.next_seq));
  while (!run.waiting.empty() && run.refused.erase(run.next_seq) > 0) ++run.next_seq;
}

void Runs::fail_waiting(Run& run, const std::string& message) {
  if (run.waiting.empty()) return;
  run.next_seq = run.waiting.rbegin()->first + 1;
  run.waiting_bytes = 0;
  const auto failed = std::make_shared<std::vector<Running>>();
  for (auto& [seq, operation] : std::exchange(run.waiting, {}))
    failed->push_back({{}, std::move(operation), Outcome::failure(message, "user"), {}});
  store(failed, [] {});
}

void Runs::release(tenants::SetId set) {
  model_.run([set](Backend& backend) {
    try {
      backend.remove(set);
    } catch (const std::exception& error) {
      log::error("a set of adapters cannot be removed: {}", error.what());
    }
  });
}

void Runs::close(const std::string& run, const std::string& reason) {
  const auto found = runs_.find(run);
  if (found == runs_.end()) return;
  Run& entry = found->second;
  fail_waiting(entry, reason);
  if (entry.is_running) {
    entry.is_closed = true;
    return;
  }
  if (entry.set) release(*entry.set);
  runs_.erase(found);
  join_after(0);  // its place is free
}

void Runs::tick() {
  for (auto& [id, run] : runs_) {
    if (run.waiting.empty() || run.is_running || has_next(run)) {
      run.blocked_since = Clock::now();
      continue;
    }
    const std::chrono::duration<double> blocked = Clock::now() - run.blocked_since;
    if (blocked.count() > options_.gap_s)
      fail_waiting(run, fmt::format("seq_id {} of run {} has not come for {} s: later requests "
                                    "cannot run before it",
                                    run.next_seq, id, options_.gap_s));
  }
}

}  // namespace heddle::serve::tinker
