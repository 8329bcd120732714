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

constexpr std::int64_t kCloneStride =
    1'000'000'000;  ///< seq_ids of one clone of a sampling client.
enum State : std::int64_t { kPending = 0, kDone = 1, kFailed = 2 };

std::string dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace

Outcome Outcome::failure(const std::string& message, const std::string& category) {
  return {true, false, dump({{"error", message}, {"category", category}})};
}

Promises::Promises(Server& server, Database& database, const Options& options)
    : server_(server), database_(database), options_(options) {}

Promises::Promise Promises::make(const Submission& submission,
                                 const std::function<std::string(const std::string& id)>& answer) {
  const auto place = std::pair(submission.owner, submission.seq);
  if (submission.seq >= 0) {
    if (!by_place_.contains(place)) {
      Statement row(database_, "SELECT id FROM request WHERE owner = ? AND seq = ?");
      if (row.bind(submission.owner).bind(submission.seq).step()) load(row.text(0));
    }
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

std::int64_t Promises::next_cursor() {
  last_cursor_ = std::max(last_cursor_ + 1, static_cast<std::int64_t>(now_s() * 1e6));
  return last_cursor_;
}

void Promises::finish(const std::string& id, const Outcome& outcome) {
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.is_finished) return;
  Entry& entry = found->second;
  if (entry.is_durable) {
    Statement(database_,
              "UPDATE request SET state = ?, is_proto = ?, result = ?, finished = ? WHERE id = ?")
        .bind(std::int64_t{outcome.is_failed ? kFailed : kDone})
        .bind(std::int64_t{outcome.is_proto})
        .bind_blob(outcome.bytes)
        .bind(now_s())
        .bind(id)
        .run();
  }
  entry.is_finished = true;
  entry.outcome = outcome;
  entry.cursor = next_cursor();
  entry.on_cancel = nullptr;
  for (const Poll& poll : std::exchange(entry.polls, {})) give(outcome, poll);
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

void Promises::set_state(const std::string& id, const std::string& state,
                         const std::string& reason) {
  if (const auto found = entries_.find(id); found != entries_.end()) {
    found->second.state = state;
    found->second.reason = reason;
  }
}

void Promises::on_cancel(const std::string& id, std::function<void()> action) {
  if (const auto found = entries_.find(id); found != entries_.end())
    found->second.on_cancel = std::move(action);
}

void Promises::load(const std::string& id) {
  Statement row(database_,
                "SELECT tenant, owner, promise, hash, seq, state, is_proto, result, finished FROM "
                "request WHERE id = ?");
  if (!row.bind(id).step()) return;
  Entry entry{row.text(0), row.text(1), row.text(2), row.text(3), row.integer(4)};
  entry.is_finished = row.integer(5) != kPending;
  entry.outcome = {row.integer(5) == kFailed, row.integer(6) != 0, row.text(7)};
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

void Promises::give(const Outcome& outcome, const Poll& poll) const {
  if (outcome.is_proto && poll.allows_metadata && outcome.bytes.size() > options_.metadata_bytes) {
    poll.responder.answer(200, dump({{"status", "complete_metadata"},
                                     {"response_payload_size", outcome.bytes.size()}}));
  } else if (outcome.is_proto && !poll.takes_proto) {
    poll.responder.answer(
        200, Outcome::failure("this result is sent as application/x-protobuf only: use tinker 0.25 "
                              "or newer",
                              "user")
                 .bytes);
  } else {
    poll.responder.answer(200, outcome.bytes,
                          outcome.is_proto ? "application/x-protobuf" : "application/json");
  }
}

void Promises::retrieve(const Request& request, const Responder& responder) {
  const Fields fields(request.body);
  const std::string id = fields.text("request_id");
  Entry* entry = stored(id);
  if (entry == nullptr || entry->tenant != request.caller.tenant)
    throw HttpError(410, "this promise is not known: it is too old, or the server was restarted");
  const bool takes_proto =
      request.header("accept").find("application/x-protobuf") != std::string_view::npos;
  const Poll poll{next_poll_++, responder, takes_proto,
                  fields.boolean("allow_metadata_only", false)};
  if (entry->is_finished) return give(entry->outcome, poll);
  const auto again = [](const std::string& request_id, const Entry& waiting) {
    json answer{{"type", "try_again"}, {"request_id", request_id}, {"queue_state", waiting.state}};
    if (!waiting.reason.empty()) answer["queue_state_reason"] = waiting.reason;
    return dump(answer);
  };
  if (is_draining_) return responder.answer(200, again(id, *entry));
  entry->polls.push_back(poll);
  const auto leave = [this, id, number = poll.number]() -> Entry* {
    const auto found = entries_.find(id);
    if (found == entries_.end()) return nullptr;
    const auto gone =
        std::erase_if(found->second.polls, [&](const Poll& each) { return each.number == number; });
    return gone == 0 ? nullptr : &found->second;
  };
  responder.on_gone([leave] { leave(); });
  server_.post_after(options_.poll_s, [leave, again, id, responder] {
    if (const Entry* waiting = leave()) responder.answer(200, again(id, *waiting));
  });
}

std::string Promises::completions(const std::string& owner, const OwnerPoll& poll) {
  std::vector<std::pair<std::int64_t, json>> found;
  for (auto place = by_place_.lower_bound({owner, poll.first_seq});
       place != by_place_.end() && place->first.first == owner &&
       place->first.second <= poll.last_seq;
       ++place) {
    const Entry& entry = entries_.at(place->second);
    if (!entry.is_finished || entry.cursor <= poll.cursor) continue;
    json completion{{"state", entry.outcome.is_failed ? "failed" : "finished"},
                    {"request_id", place->second}};
    if (!entry.outcome.is_failed)
      completion["response_payload_uncompressed_size"] = entry.outcome.bytes.size();
    found.emplace_back(entry.cursor, std::move(completion));
  }
  if (found.empty()) return "";
  std::ranges::sort(found, {}, &std::pair<std::int64_t, json>::first);
  json list = json::array();
  for (auto& [cursor, completion] : found) list.push_back(std::move(completion));
  return dump({{"completions", std::move(list)}, {"cursor", found.back().first}});
}

void Promises::acknowledge(const std::string& owner, const std::string& tenant,
                           const std::vector<std::string>& ids) {
  for (const std::string& id : ids) {
    const auto found = entries_.find(id);
    if (found != entries_.end() && found->second.owner == owner && found->second.tenant == tenant &&
        found->second.is_finished)
      erase(id);
  }
}

void Promises::erase(const std::string& id) {
  const auto found = entries_.find(id);
  by_place_.erase({found->second.owner, found->second.seq});
  entries_.erase(found);
}

void Promises::retrieve_many(const Request& request, const Responder& responder) {
  const Fields fields(request.body);
  const Fields target = fields.object("target");
  const std::string owner = target.text("sampling_session_id");
  Statement row(database_, "SELECT 1 FROM sampler WHERE id = ? AND tenant = ?");
  if (!row.bind(owner).bind(request.caller.tenant).step())
    throw HttpError(404, "this sampling session is not known");
  const std::int64_t clone = target.integer("cloned_sampler_id", 0);
  if (clone < 0 || clone > INT64_MAX / kCloneStride - 1)
    target.refuse("cloned_sampler_id", "a number from 0 on");
  std::vector<std::string> retrieved;
  if (fields.find("retrieved_request_ids") != nullptr) {
    for (const json& id : fields.list("retrieved_request_ids")) {
      if (!id.is_string()) fields.refuse("retrieved_request_ids", "a list of strings");
      retrieved.push_back(id);
    }
  }
  acknowledge(owner, request.caller.tenant, retrieved);
  const OwnerPoll poll{next_poll_++, clone * kCloneStride, (clone + 1) * kCloneStride - 1,
                       fields.integer("prev_cursor", 0), responder};
  const std::string none = dump({{"completions", json::array()}, {"cursor", poll.cursor}});
  const double wait_s = std::min(fields.number("timeout", options_.poll_s), options_.poll_s);
  if (const std::string answer = completions(owner, poll); !answer.empty())
    return responder.answer(200, answer);
  if (wait_s <= 0 || is_draining_) return responder.answer(200, none);
  owner_polls_[owner].push_back(poll);
  const auto leave = [this, owner, number = poll.number] {
    const auto found = owner_polls_.find(owner);
    if (found == owner_polls_.end()) return false;
    const bool was_there = std::erase_if(found->second, [&](const OwnerPoll& each) {
                             return each.number == number;
                           }) > 0;
    if (found->second.empty()) owner_polls_.erase(found);
    return was_there;
  };
  responder.on_gone([leave] { leave(); });
  server_.post_after(wait_s, [leave, none, responder] {
    if (leave()) responder.answer(200, none);
  });
}

void Promises::cancel(const Request& request, const Responder& responder) {
  const std::string id = Fields(request.body).text("request_id");
  const Entry* entry = stored(id);
  if (entry == nullptr || entry->tenant != request.caller.tenant)
    throw HttpError(404, "this promise is not known");
  if (const auto action = entry->on_cancel) action();
  responder.answer(204, "");
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

void Promises::sweep() {
  const double oldest = now_s() - options_.kept_s;
  std::vector<std::string> old;
  for (const auto& [id, entry] : entries_) {
    // Outcomes that are on the disk need not stay here as well.
    const double kept_s = entry.is_durable ? options_.poll_s : options_.kept_s;
    if (entry.is_finished && static_cast<double>(entry.cursor) * 1e-6 < now_s() - kept_s)
      old.push_back(id);
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
