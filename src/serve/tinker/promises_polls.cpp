// Polls of clients for what they were promised.
#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "serve/tinker/fields.h"
#include "serve/tinker/old_results.h"
#include "serve/tinker/promises.h"

namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

constexpr std::int64_t kCloneStride =
    1'000'000'000;  ///< seq_ids of one clone of a sampling client.

}  // namespace

void Promises::give(Entry& entry, const Poll& poll) const {
  const Outcome& outcome = entry.outcome;
  if (outcome.is_proto() && poll.allows_metadata &&
      outcome.bytes.size() > options_.metadata_bytes) {
    poll.responder.answer(200, dump({{"status", "complete_metadata"},
                                     {"response_payload_size", outcome.bytes.size()}}));
    return;
  }
  entry.fetched = now_s();
  if (outcome.is_proto() && !poll.takes_proto) {
    poll.responder.answer(200, outcome.form == Outcome::Form::kSample
                                   ? sample_as_json(outcome.bytes)
                                   : forward_backward_as_json(outcome.bytes));
  } else {
    poll.responder.answer(200, outcome.bytes,
                          outcome.is_proto() ? "application/x-protobuf" : "application/json");
  }
}

std::string Promises::try_again(const std::string& id) const {
  QueueState state;
  if (const auto found = entries_.find(id); found != entries_.end() && found->second.queue_state)
    state = found->second.queue_state();
  const char* const name = state.kind == QueueState::Kind::kPausedCapacity    ? "paused_capacity"
                           : state.kind == QueueState::Kind::kPausedRateLimit ? "paused_rate_limit"
                                                                              : "active";
  json answer{{"type", "try_again"}, {"request_id", id}, {"queue_state", name}};
  if (!state.reason.empty()) answer["queue_state_reason"] = state.reason;
  return dump(answer);
}

void Promises::retrieve(const Request& request, const Responder& responder) {
  const Fields fields(request.body, known::kRetrieveFuture);
  const std::string id = fields.text("request_id");
  Entry* entry = stored(id);
  if (entry == nullptr || entry->tenant != request.caller.tenant)
    throw HttpError(410, "this promise is not known: it is too old, or the server was restarted");
  const bool takes_proto =
      request.header("accept").find("application/x-protobuf") != std::string_view::npos;
  const Poll poll{next_poll_++, responder, takes_proto,
                  fields.boolean("allow_metadata_only", false)};
  if (entry->is_finished) return give(*entry, poll);
  if (is_draining_) return responder.answer(200, try_again(id));
  entry->polls.push_back(poll);
  const auto leave = [this, id, number = poll.number] {
    const auto found = entries_.find(id);
    return found != entries_.end() && std::erase_if(found->second.polls, [&](const Poll& each) {
                                        return each.number == number;
                                      }) > 0;
  };
  responder.on_gone([leave] { leave(); });
  server_.post_after(options_.poll_s, [this, leave, id, responder] {
    if (leave()) responder.answer(200, try_again(id));
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

void Promises::retrieve_many(const Request& request, const Responder& responder) {
  const Fields fields(request.body, known::kRetrieveFutures);
  const Fields target = fields.object("target", known::kFuturesTarget);
  if (target.text("type", "sampling_session") != "sampling_session")
    target.refuse("type", "sampling_session");
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
  // null: as long as the server likes.
  const double wait_s = fields.find("timeout") == nullptr
                            ? options_.poll_s
                            : std::min(fields.number("timeout", options_.poll_s), options_.poll_s);
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
  const std::string id = Fields(request.body, known::kCancelFuture).text("request_id");
  const Entry* entry = stored(id);
  if (entry == nullptr || entry->tenant != request.caller.tenant)
    throw HttpError(404, "this promise is not known");
  if (const auto action = entry->on_cancel) action();
  responder.answer(204, "");
}

}  // namespace heddle::serve::tinker
