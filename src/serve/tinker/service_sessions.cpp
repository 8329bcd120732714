#include <fmt/ranges.h>

#include <algorithm>

#include "base/quote.h"
#include "base/random_hex.h"
#include "serve/tinker/service.h"

// Sessions of clients.
namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

constexpr int kSessionRetry_s = 30;  ///< Until a client may have finished a session.

/// Why a client finished its session: {type, detail}, as the database keeps it.
json finish_of(const Fields& fields) {
  const std::string type = fields.find("reason") == nullptr
                               ? "success"
                               : fields.object("reason", known::kFinishReason).text("type");
  if (type != "success" && type != "errored" && type != "interrupted")
    throw_http(422, "field reason.type is {}: expected success, errored or interrupted",
               text::shown(type, 40));
  json finish{{"type", type}};
  if (const auto detail = fields.maybe_text("detail")) finish["detail"] = *detail;
  return finish;
}

/// The state of a session that ended so.
json status_of(json finish) {
  json status{{"type", "client_finished"}};
  if (const auto detail = finish.find("detail"); detail != finish.end()) {
    status["detail"] = *detail;
    finish.erase(detail);
  }
  status["reason"] = std::move(finish);
  return status;
}

/// Names of a new session's wishes that are not granted.
std::string warning_of(const Fields& fields) {
  std::vector<std::string> warnings;
  if (fields.maybe_text("project_id").value_or(kOnlyProject) != kOnlyProject)
    warnings.push_back(
        fmt::format("project_id is not used: this server has one project, '{}'", kOnlyProject));
  if (fields.find("tags") != nullptr && !fields.list("tags").empty())
    warnings.emplace_back(
        "tags are not kept: this server knows sessions by display_name and "
        "user_metadata");
  return fmt::format("{}", fmt::join(warnings, "; "));
}

}  // namespace

void Service::create_session(const Request& request, const Responder& responder) {
  const Fields fields(request.body, known::kCreateSession);
  const std::string warning = warning_of(fields);
  Statement count(data_.database(),
                  "SELECT count(*) FROM session WHERE tenant = ? AND finished IS NULL");
  count.bind(request.caller.tenant).step();
  if (count.integer(0) >= options_.sessions_per_tenant)
    throw HttpError(
        429,
        fmt::format("{} sessions of this key's tenant are open, which is the limit: finish some",
                    count.integer(0)),
        kSessionRetry_s);
  const std::string id = random_hex(8);
  const json* metadata = fields.find("user_metadata");
  Statement(data_.database(),
            "INSERT INTO session(id, tenant, created, last_beat, display_name, metadata) VALUES "
            "(?, ?, ?, ?, ?, ?)")
      .bind(id)
      .bind(request.caller.tenant)
      .bind(now_s())
      .bind(now_s())
      .bind(fields.maybe_text("display_name"))
      .bind(metadata == nullptr ? "null" : dump(*metadata))
      .run();
  audit_.note(request.caller, "session_create", id);
  beats_[id] = now_s();
  json answer{{"type", "create_session"}, {"session_id", id}};
  if (!warning.empty()) answer["warning_message"] = warning;
  responder.answer(200, dump(answer));
}

void Service::require_session(const Request& request, const std::string& session) {
  Statement row(data_.database(), "SELECT finished FROM session WHERE id = ? AND tenant = ?");
  if (!row.bind(session).bind(request.caller.tenant).step())
    throw_http(404, "session {} is not known", text::shown(session, 60));
  if (!row.is_null(0)) throw_http(410, "session {} has ended", session);
}

void Service::heartbeat(const Request& request, const Responder& responder) {
  const std::string session = Fields(request.body, known::kHeartbeat).text("session_id");
  require_session(request, session);
  beats_[session] = now_s();
  responder.answer(200, dump({{"type", "session_heartbeat"}}));
}

void Service::finish_session(const Request& request, const Responder& responder) {
  const std::string session = request.parameters.at("id");
  const json finish = finish_of(Fields(request.body, known::kFinishSession));
  Statement row(data_.database(), "SELECT 1 FROM session WHERE id = ? AND tenant = ?");
  if (!row.bind(session).bind(request.caller.tenant).step())
    throw_http(404, "session {} is not known", text::shown(session, 60));
  Statement(data_.database(), "UPDATE session SET finished = ? WHERE id = ? AND finished IS NULL")
      .bind(dump(finish))
      .bind(session)
      .run();
  audit_.note(request.caller, "session_finish", session);
  end_session(session, "the session was finished by its client");
  responder.answer(204, "");
}

void Service::end_session(const std::string& session, const std::string& reason) {
  beats_.erase(session);
  weights_.forget_session(session);
  promises_.forget_samples(sampler_prefix(session));
  std::vector<std::pair<std::string, std::string>> runs;
  Statement rows(data_.database(), "SELECT id, tenant FROM run WHERE session = ? AND is_live = 1");
  rows.bind(session);
  while (rows.step()) runs.emplace_back(rows.text(0), rows.text(1));
  for (const auto& [run, tenant] : runs) {
    runs_.close(run, reason);
    forget_run(run, tenant);
  }
  Statement(data_.database(), "UPDATE request SET body = x'' WHERE owner = ? AND seq >= 0")
      .bind(session + "/runs")
      .run();
}

void Service::list_sessions(const Request& request, const Responder& responder) {
  Statement rows(data_.database(),
                 "SELECT id FROM session WHERE tenant = ? ORDER BY created DESC LIMIT ? OFFSET ?");
  check_query(request, known::kList);
  const Page page = page_of(request);
  rows.bind(request.caller.tenant).bind(page.limit).bind(page.offset);
  json ids = json::array();
  while (rows.step()) ids.push_back(rows.text(0));
  responder.answer(200, dump({{"sessions", ids}}));
}

void Service::search_sessions(const Request& request, const Responder& responder) {
  const Fields fields(request.body, known::kSearchSessions);
  const auto session = fields.maybe_text("session_id");
  if (fields.find("owner") != nullptr) {
    const std::string owner = fields.object("owner", known::kSearchOwner).text("type");
    // A tenant sees its own sessions alone.
    if (owner != "own" && owner != "accessible")
      throw_http(400, "searching by owner {} is not built: search for own or accessible sessions",
                 text::shown(owner, 40));
  }
  const std::int64_t limit = std::clamp<std::int64_t>(fields.integer("limit", 50), 1, 200);
  for (const char* name : {"user_metadata", "display_name", "statuses", "project_ids", "cursor"}) {
    const json* value = fields.find(name);
    if (value != nullptr && !value->empty())
      throw_http(400, "searching by {} is not built: search by session_id", name);
  }
  Statement rows(
      data_.database(),
      "SELECT s.id, s.created, s.display_name, s.metadata, s.finished, (SELECT count(*) "
      "FROM checkpoint c JOIN run r ON c.run = r.id WHERE r.session = s.id) FROM session "
      "s WHERE s.tenant = ? AND (? IS NULL OR s.id = ?) ORDER BY s.created DESC LIMIT ?");
  rows.bind(request.caller.tenant).bind(session).bind(session).bind(limit);
  json found = json::array();
  while (rows.step()) {
    json each{{"session_id", rows.text(0)},
              {"created_at", as_utc(rows.real(1))},
              {"owner", request.caller.tenant},
              {"project_id", "default"},
              {"checkpoints_count", rows.integer(5)}};
    if (!rows.is_null(2)) each["display_name"] = rows.text(2);
    if (const json metadata = json::parse(rows.text(3)); metadata.is_object())
      each["user_metadata"] = metadata;
    each["status"] =
        rows.is_null(4) ? json{{"type", "active"}} : status_of(json::parse(rows.text(4)));
    found.push_back(std::move(each));
  }
  responder.answer(200, dump({{"sessions", found}}));
}

void Service::get_session(const Request& request, const Responder& responder) {
  check_query(request, known::kOne);
  const std::string id = request.parameters.at("id");
  Statement row(data_.database(),
                "SELECT display_name, metadata FROM session WHERE id = ? AND tenant = ?");
  if (!row.bind(id).bind(request.caller.tenant).step())
    throw_http(404, "session {} is not known", text::shown(id, 60));
  const auto ids = [&](const char* sql) {
    Statement rows(data_.database(), sql);
    rows.bind(id);
    json list = json::array();
    while (rows.step()) list.push_back(rows.text(0));
    return list;
  };
  json answer{{"training_run_ids", ids("SELECT id FROM run WHERE session = ? ORDER BY created")},
              {"sampler_ids", ids("SELECT id FROM sampler WHERE session = ? ORDER BY created")}};
  if (!row.is_null(0)) answer["display_name"] = row.text(0);
  if (const json metadata = json::parse(row.text(1)); metadata.is_object())
    answer["user_metadata"] = metadata;
  responder.answer(200, dump(answer));
}

}  // namespace heddle::serve::tinker
