#include "serve/tinker/service.h"

#include <algorithm>

#include "base/log.h"
#include "base/quote.h"
#include "base/random_hex.h"

namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

constexpr double kTick_s = 10;
constexpr std::int64_t kMostPage = 1000;
constexpr int kSessionRetry_s = 30;  ///< Until a client may have finished a session.

constexpr const char* kNoHead =
    "train_unembed is taken as false: this server has no adapters on the language-model head";

std::string error_body(int, const std::string& message) { return dump({{"detail", message}}); }

}  // namespace

std::string dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

Service::Service(Server& server, ModelThread& model, DataDirectory& data,
                 const ServiceOptions& options)
    : server_(server),
      model_(model),
      data_(data),
      options_(options),
      promises_(server, data.database(), options.promises),
      runs_(server, model, promises_, options.runs),
      checkpoints_(data) {
  Statement living(data_.database(), "SELECT id FROM session WHERE finished IS NULL");
  while (living.step()) beats_[living.text(0)] = now_s();
}

void Service::route(const char* method, const std::string& path, const char* scope,
                    void (Service::*handler)(const Request&, const Responder&), On on) {
  const bool changes = std::string(scope) == "train" || std::string(scope) == "sample";
  server_.route({method, "/api/v1/" + path,
                 [this, handler, changes](Request&& request, const Responder& responder) {
                   if (changes && server_.is_draining()) throw HttpError(503, "the server ends", 5);
                   (this->*handler)(request, responder);
                 },
                 error_body, scope, false, on == On::kWorker});
}

void Service::on_loop(const Responder& responder, std::function<void()> work) {
  server_.post([responder, work = std::move(work)] {
    try {
      work();
    } catch (const HttpError& error) {
      Headers headers;
      if (error.retry_after_s() > 0) headers["Retry-After"] = std::to_string(error.retry_after_s());
      responder.answer(error.status(), error_body(0, error.what()), "application/json", headers);
    } catch (const UserError& error) {
      responder.answer(400, error_body(0, error.what()));
    } catch (const std::exception& error) {
      log::error("a request fails: {}", error.what());
      responder.answer(500, error_body(0, "internal error"));
    }
  });
}

void Service::serve() {
  server_.route(
      {"GET", "/api/v1/healthz",
       [this](Request&& request, const Responder& responder) { health(request, responder); },
       error_body, "", true, false});
  route("GET", "get_server_capabilities", "", &Service::capabilities);
  route("POST", "client/config", "", &Service::client_config);
  route("POST", "client/dynamic_config", "", &Service::dynamic_config);
  route("POST", "telemetry", "", &Service::telemetry);
  route("GET", "auth/apikey/me", "", &Service::who);
  route("POST", "create_session", "", &Service::create_session);
  route("POST", "session_heartbeat", "", &Service::heartbeat);
  route("POST", "sessions/search", "", &Service::search_sessions);
  route("POST", "sessions/{id}/finish", "", &Service::finish_session);
  route("GET", "sessions", "", &Service::list_sessions);
  route("GET", "sessions/{id}", "", &Service::get_session);
  route("POST", "retrieve_future", "", &Service::retrieve_future);
  route("POST", "retrieve_futures", "", &Service::retrieve_futures);
  route("POST", "cancel_future", "", &Service::cancel_future);

  route("POST", "create_model", "train", &Service::create_model);
  route("POST", "get_info", "", &Service::get_info);
  route("POST", "forward_backward", "train", &Service::forward_backward, On::kWorker);
  route("POST", "forward", "train", &Service::forward, On::kWorker);
  route("POST", "optim_step", "train", &Service::optim_step);
  route("POST", "unload_model", "train", &Service::unload_model);
  route("POST", "save_weights", "train", &Service::save_weights);
  route("POST", "save_weights_for_sampler", "train", &Service::save_weights_for_sampler);
  route("POST", "save_weights_external", "train", &Service::save_weights_external);
  route("POST", "load_weights", "train", &Service::load_weights);
  route("POST", "weights_info", "", &Service::weights_info);

  route("POST", "create_sampling_session", "sample", &Service::create_sampling_session);
  route("POST", "join_sampling_session", "sample", &Service::join_sampling_session);
  route("GET", "samplers/{id}", "", &Service::get_sampler);
  route("POST", "asample", "sample", &Service::sample, On::kWorker);

  route("GET", "training_runs", "", &Service::list_runs);
  route("GET", "training_runs/{run}", "", &Service::get_run);
  route("GET", "training_runs/{run}/checkpoints", "", &Service::list_run_checkpoints);
  route("GET", "checkpoints", "", &Service::list_checkpoints);
  route("POST", "training_runs/{run}/checkpoints/{id+}/publish", "train",
        &Service::publish_checkpoint);
  route("DELETE", "training_runs/{run}/checkpoints/{id+}/publish", "train",
        &Service::unpublish_checkpoint);
  route("PUT", "training_runs/{run}/checkpoints/{id+}/ttl", "train", &Service::set_ttl);
  route("DELETE", "training_runs/{run}/checkpoints/{id+}", "train", &Service::delete_checkpoint);
  for (const char* path : {"create_custom_loss", "copy_weights", "auth/token"})
    route("POST", path, "", &Service::not_built);
  for (const char* path :
       {"sessions/{id}/project", "sessions/{id}/trace_export", "audit", "billing/{more+}",
        "training_runs/{run}/checkpoints/{id+}/external_weights_urls"})
    route("GET", path, "", &Service::not_built);
  restore();
  server_.post_after(kTick_s, [this] { tick(); });
}

void Service::tick() {
  runs_.tick();
  promises_.sweep();
  checkpoints_.sweep();
  const double now = now_s();
  std::vector<std::string> silent;
  for (const auto& [session, beat] : beats_)
    if (now - beat > options_.session_timeout_s) silent.push_back(session);
  for (const std::string& session : silent) {
    Statement(data_.database(), "UPDATE session SET finished = ? WHERE id = ?")
        .bind(dump({{"type", "errored"}, {"detail", "no heart-beat"}}))
        .bind(session)
        .run();
    end_session(session, "the session ended: no heart-beat came");
  }
  server_.post_after(kTick_s, [this] { tick(); });
}

void Service::drain() {
  runs_.drain();
  promises_.drain();
}

void Service::health(const Request&, const Responder& responder) {
  responder.answer(200, dump({{"status", "ok"}}));
}

void Service::capabilities(const Request&, const Responder& responder) {
  const ModelFacts& facts = model_.facts();
  responder.answer(200, dump({{"supported_models",
                               {{{"model_name", facts.name},
                                 {"max_context_length", facts.max_context},
                                 {"trainable", true},
                                 {"sampleable", true}}}}}));
}

void Service::client_config(const Request&, const Responder& responder) {
  responder.answer(200, dump({{"pjwt_auth_enabled", false},
                              {"credential_default_source", "api_key"},
                              {"parallel_fwdbwd_chunks", true},
                              {"proto_compress_fwdbwd", options_.compresses_bodies},
                              {"proto_write_fwdbwd", false},
                              {"fwd_via_fwdbwd", false},
                              {"create_model_via_load_weights", true},
                              {"fwdbwd_max_chunk_len", 1024},
                              {"fwdbwd_max_chunk_bytes_count", 5'000'000},
                              {"fwdbwd_dispatch_bytes_semaphore_size", 50'000'000},
                              {"sample_max_concurrent_requests",
                               std::max<std::int64_t>(4, 4 * model_.facts().max_sequences)},
                              {"sample_use_retrieve_futures", true},
                              {"sample_join_sampling_session", true},
                              {"sample_no_retries", false},
                              {"sample_enable_stuck_detection", true},
                              {"use_pyqwest_transport", true},
                              {"custom_loss_server_side", false}}));
}

void Service::dynamic_config(const Request&, const Responder& responder) {
  responder.answer(200, dump({{"refresh_interval_sec", 300},
                              {"sample_cancel_enabled", true},
                              {"sample_cancel_max_batch_size", 64}}));
}

void Service::telemetry(const Request&, const Responder& responder) {
  responder.answer(200, dump({{"status", "accepted"}}));
}

void Service::who(const Request& request, const Responder& responder) {
  responder.answer(200, dump({{"tenant", request.caller.tenant},
                              {"key_prefix", request.caller.key_prefix},
                              {"scopes", request.caller.scopes}}));
}

void Service::retrieve_future(const Request& request, const Responder& responder) {
  promises_.retrieve(request, responder);
}
void Service::retrieve_futures(const Request& request, const Responder& responder) {
  promises_.retrieve_many(request, responder);
}
void Service::cancel_future(const Request& request, const Responder& responder) {
  promises_.cancel(request, responder);
}

void Service::not_built(const Request& request, const Responder&) {
  throw_http(501, "{} is not built in this server", text::shown(request.path));
}

void Service::create_session(const Request& request, const Responder& responder) {
  const Fields fields(request.body);
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
  beats_[id] = now_s();
  responder.answer(
      200, dump({{"type", "create_session"}, {"session_id", id}, {"warning_message", kNoHead}}));
}

void Service::require_session(const Request& request, const std::string& session) {
  Statement row(data_.database(), "SELECT finished FROM session WHERE id = ? AND tenant = ?");
  if (!row.bind(session).bind(request.caller.tenant).step())
    throw_http(404, "session {} is not known", text::shown(session, 60));
  if (!row.is_null(0)) throw_http(410, "session {} has ended", session);
}

void Service::heartbeat(const Request& request, const Responder& responder) {
  const std::string session = Fields(request.body).text("session_id");
  require_session(request, session);
  beats_[session] = now_s();
  responder.answer(200, dump({{"type", "session_heartbeat"}}));
}

void Service::finish_session(const Request& request, const Responder& responder) {
  const std::string session = request.parameters.at("id");
  const Fields fields(request.body);
  Statement row(data_.database(), "SELECT 1 FROM session WHERE id = ? AND tenant = ?");
  if (!row.bind(session).bind(request.caller.tenant).step())
    throw_http(404, "session {} is not known", text::shown(session, 60));
  json reason = fields.find("reason") == nullptr ? json::object() : *fields.find("reason");
  Statement(data_.database(), "UPDATE session SET finished = ? WHERE id = ? AND finished IS NULL")
      .bind(dump(reason))
      .bind(session)
      .run();
  end_session(session, "the session was finished by its client");
  responder.answer(204, "");
}

void Service::end_session(const std::string& session, const std::string& reason) {
  beats_.erase(session);
  Statement runs(data_.database(), "SELECT id FROM run WHERE session = ?");
  runs.bind(session);
  while (runs.step()) {
    runs_.close(runs.text(0), reason);
    steps_.erase(runs.text(0));
    Statement(data_.database(), "UPDATE request SET body = x'' WHERE owner = ?")
        .bind(runs.text(0))
        .run();
  }
  Statement(data_.database(), "UPDATE run SET is_live = 0 WHERE session = ?").bind(session).run();
}

void Service::list_sessions(const Request& request, const Responder& responder) {
  const auto whole = [&](const char* name, std::int64_t otherwise) {
    const auto found = request.query.find(name);
    if (found == request.query.end()) return otherwise;
    char* end = nullptr;
    const std::int64_t value = std::strtoll(found->second.c_str(), &end, 10);
    if (*end != '\0' || value < 0 || found->second.empty())
      throw_http(422, "{} is {}: expected a count", name, text::shown(found->second, 40));
    return value;
  };
  Statement rows(data_.database(),
                 "SELECT id FROM session WHERE tenant = ? ORDER BY created DESC LIMIT ? OFFSET ?");
  rows.bind(request.caller.tenant)
      .bind(std::min(whole("limit", 20), kMostPage))
      .bind(whole("offset", 0));
  json ids = json::array();
  while (rows.step()) ids.push_back(rows.text(0));
  responder.answer(200, dump({{"sessions", ids}}));
}

void Service::search_sessions(const Request& request, const Responder& responder) {
  const Fields fields(request.body);
  const auto session = fields.maybe_text("session_id");
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
    each["status"] = rows.is_null(4)
                         ? json{{"type", "active"}}
                         : json{{"type", "client_finished"}, {"reason", json::parse(rows.text(4))}};
    found.push_back(std::move(each));
  }
  responder.answer(200, dump({{"sessions", found}}));
}

void Service::get_session(const Request& request, const Responder& responder) {
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
