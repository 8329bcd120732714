#include "serve/tinker/promises.h"

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/random_hex.h"
#include "serve/store/data_directory.h"
#include "serve/tinker/fields.h"

namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

enum State : std::int64_t { kPending = 0, kDone = 1, kFailed = 2 };

}  // namespace

Outcome Outcome::failure(const std::string& message, const std::string& category) {
  return {true, Form::kJson, dump({{"error", message}, {"category", category}}), false};
}

Promises::Promises(Server& server, Database& database, const Options& options)
    : server_(server), database_(database), options_(options) {}

Promises::Promise Promises::make(const Submission& submission,
                                 const std::function<std::string(const std::string& id)>& answer) {
  const auto place = std::pair(submission.owner, submission.seq);
  if (submission.seq >= 0) {
    load_place(submission.owner, submission.seq);
    if (const auto found = by_place_.find(place); found != by_place_.end()) {
      const Entry& entry = entries_.at(found->second);
      if (entry.hash != submission.hash || entry.tenant != submission.tenant)
        throw_http(409, "seq_id {} of {} was used with another body", submission.seq,
                   submission.owner);
      return {found->second, entry.answer, false};
    }
  }
  const std::string id = "r-" + random_hex(12);
  Entry entry{submission.tenant, submission.owner, answer(id),
              submission.hash,   submission.seq,   submission.is_durable};
  if (submission.is_durable) {
    Statement(database_,
              "INSERT INTO request(id, tenant, owner, seq, kind, hash, state, promise, body, "
              "created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)")
        .bind(id)
        .bind(submission.tenant)
        .bind(submission.owner)
        .bind(submission.seq)
        .bind(submission.kind)
        .bind(submission.hash)
        .bind(std::int64_t{kPending})
        .bind(entry.answer)
        .bind_blob(submission.body)
        .bind(now_s())
        .run();
  }
  if (submission.seq >= 0) by_place_[place] = id;
  const Promise promise{id, entry.answer, true};
  entries_.emplace(id, std::move(entry));
  return promise;
}

Promises::Promise Promises::make_failed(
    const Submission& submission, const std::function<std::string(const std::string& id)>& answer,
    const std::string& message) {
  const Outcome outcome = Outcome::failure(message, "user");
  Transaction together(database_);
  const Promise promise = make(submission, answer);
  if (!promise.is_new) return promise;
  try {
    store(promise.id, outcome);
    together.commit();
  } catch (...) {
    erase(promise.id);
    throw;
  }
  tell(promise.id, outcome);
  return promise;
}

void Promises::fail(const std::string& owner, std::int64_t seq, const std::string& message) {
  load_place(owner, seq);
  const auto found = by_place_.find({owner, seq});
  if (found != by_place_.end() && !entries_.at(found->second).is_finished)
    finish(found->second, Outcome::failure(message, "user"));
}

void Promises::load_place(const std::string& owner, std::int64_t seq) {
  if (by_place_.contains({owner, seq})) return;
  Statement row(database_, "SELECT id FROM request WHERE owner = ? AND seq = ? AND seq >= 0");
  if (row.bind(owner).bind(seq).step()) load(row.text(0));
}

std::int64_t Promises::next_cursor() {
  last_cursor_ = std::max(last_cursor_ + 1, static_cast<std::int64_t>(now_s() * 1e6));
  return last_cursor_;
}

void Promises::store(const std::string& id, const Outcome& outcome) {
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.is_finished || !found->second.is_durable) return;
  Statement(
      database_,
      "UPDATE request SET state = ?, kind = ? || kind, is_proto = ?, result = ?, finished = ? "
      "WHERE id = ?")
      .bind(std::int64_t{outcome.is_failed ? kFailed : kDone})
      .bind(outcome.drops_gradients ? kDropped : "")
      .bind(static_cast<std::int64_t>(outcome.form))
      .bind_blob(outcome.bytes)
      .bind(now_s())
      .bind(id)
      .run();
}

void Promises::finish(const std::string& id, const Outcome& outcome) {
  store(id, outcome);
  tell(id, outcome);
}

void Promises::finish(const std::vector<std::pair<std::string, const Outcome*>>& finished,
                      const std::function<void()>& enter) {
  // One wait for the disk, before anybody is told.
  Transaction together(database_);
  enter();
  for (const auto& [id, outcome] : finished) store(id, *outcome);
  together.commit();
  for (const auto& [id, outcome] : finished) tell(id, *outcome);
}

void Promises::tell(const std::string& id, const Outcome& outcome) {
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.is_finished) return;
  Entry& entry = found->second;
  entry.is_finished = true;
  entry.outcome = outcome;
  entry.cursor = next_cursor();
  entry.on_cancel = nullptr;
  entry.queue_state = nullptr;
  for (const Poll& poll : std::exchange(entry.polls, {})) give(entry, poll);
  const std::string owner = entry.owner;
  const std::int64_t seq = entry.seq;
  auto& waiting = owner_polls_[owner];
  for (std::size_t i = waiting.size(); i-- > 0;) {
    const OwnerPoll poll = waiting[i];
    if (seq < poll.first_seq || seq > poll.last_seq) continue;
    waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
    poll.responder.answer(200, completions(owner, poll));
  }
  if (waiting.empty()) owner_polls_.erase(owner);
}

void Promises::on_cancel(const std::string& id, std::function<void()> action) {
  if (const auto found = entries_.find(id); found != entries_.end())
    found->second.on_cancel = std::move(action);
}

void Promises::on_wait(const std::string& id, std::function<QueueState()> state) {
  if (const auto found = entries_.find(id); found != entries_.end() && !found->second.is_finished)
    found->second.queue_state = std::move(state);
}

void Promises::load(const std::string& id) {
  Statement row(database_,
                "SELECT tenant, owner, promise, hash, seq, state, is_proto, result, finished FROM "
                "request WHERE id = ?");
  if (!row.bind(id).step()) return;
  Entry entry{row.text(0), row.text(1), row.text(2), row.text(3), row.integer(4)};
  entry.is_finished = row.integer(5) != kPending;
  entry.outcome = {row.integer(5) == kFailed, static_cast<Outcome::Form>(row.integer(6)),
                   row.text(7)};
  entry.cursor = row.integer(8) * 1'000'000;
  if (entry.seq >= 0) by_place_[{entry.owner, entry.seq}] = id;
  entries_.emplace(id, std::move(entry));
}

Promises::Entry* Promises::stored(const std::string& id) {
  auto found = entries_.find(id);
  if (found == entries_.end()) {
    load(id);
    found = entries_.find(id);
  }
  return found == entries_.end() ? nullptr : &found->second;
}

void Promises::erase(const std::string& id) {
  const auto found = entries_.find(id);
  by_place_.erase({found->second.owner, found->second.seq});
  entries_.erase(found);
}

void Promises::drain() {
  is_draining_ = true;
  for (auto& [id, entry] : entries_) {
    for (const Poll& poll : std::exchange(entry.polls, {}))
      poll.responder.answer(200, dump({{"type", "try_again"},
                                       {"request_id", id},
                                       {"queue_state", "paused_capacity"},
                                       {"queue_state_reason", "the server ends"}}));
  }
  for (const auto& [owner, polls] : std::exchange(owner_polls_, {})) {
    for (const OwnerPoll& poll : polls)
      poll.responder.answer(200, dump({{"completions", json::array()}, {"cursor", poll.cursor}}));
  }
}

void Promises::forget_samples(const std::string& owners) {
  std::vector<std::string> over;
  for (const auto& [id, entry] : entries_) {
    if (entry.is_finished && !entry.is_durable && entry.owner.starts_with(owners))
      over.push_back(id);
  }
  for (const std::string& id : over) erase(id);
}

void Promises::sweep() {
  const double oldest = now_s() - options_.kept_s;
  std::vector<std::string> old;
  for (const auto& [id, entry] : entries_) {
    // Outcomes that are on the disk need not stay here as well.
    const double kept_s = entry.is_durable ? options_.poll_s : options_.kept_s;
    const bool is_old = static_cast<double>(entry.cursor) * 1e-6 < now_s() - kept_s;
    const bool was_fetched = entry.fetched > 0 && entry.fetched < now_s() - options_.fetched_s;
    if (entry.is_finished && (is_old || was_fetched)) old.push_back(id);
  }
  for (const std::string& id : old) erase(id);
  Statement(database_, "DELETE FROM request WHERE state > 0 AND finished < ? AND body = x''")
      .bind(oldest)
      .run();
}

std::int64_t Promises::pending() const {
  return std::ranges::count_if(entries_,
                               [](const auto& entry) { return !entry.second.is_finished; });
}

}  // namespace heddle::serve::tinker
