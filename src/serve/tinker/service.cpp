#include "serve/tinker/service.h"

#include <algorithm>

#include "base/log.h"
#include "base/quote.h"

namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

constexpr std::int64_t kDatumBytes = 512;  ///< Its names and lengths on the wire, at most about.

}  // namespace

Service::Service(Server& server, ModelThread& model, DataDirectory& data,
                 const ServiceOptions& options)
    : server_(server),
      model_(model),
      data_(data),
      audit_(data.database()),
      options_(options),
      promises_(server, data.database(), options.promises),
      runs_(server, model, promises_, options.runs),
      checkpoints_(data),
      weights_(options.adapters_in_memory) {
  Statement living(data_.database(), "SELECT id FROM session WHERE finished IS NULL");
  while (living.step()) beats_[living.text(0)] = now_s();
}

void Service::route(const char* method, const std::string& path, const char* scope, Method handler,
                    On on, Cost cost) {
  const bool changes = std::string(scope) == "train" || std::string(scope) == "sample";
  server_.route({method, "/api/v1/" + path,
                 [this, handler, changes](Request&& request, const Responder& responder) {
                   if (changes && server_.is_draining()) throw HttpError(503, "the server ends", 5);
                   (this->*handler)(request, responder);
                 },
                 error_body, scope, false, on == On::kWorker, cost});
}

void Service::on_loop(const Responder& responder, std::function<void()> work) {
  server_.post([responder, work = std::move(work)] { answering(responder, work); });
}

void Service::answering(const Responder& responder, const std::function<void()>& work) {
  try {
    work();
  } catch (const HttpError& error) {
    responder.answer(error.status(), error_body(0, error.what()), "application/json",
                     error.headers());
  } catch (const UserError& error) {
    responder.answer(400, error_body(0, error.what()));
  } catch (const FileError& error) {
    log::error("a request fails: {}", error.what());
    responder.answer(500, error_body(0, kFilesFail));
  } catch (const std::exception& error) {
    log::error("a request fails: {}", error.what());
    responder.answer(500, error_body(0, "internal error"));
  }
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

  route("POST", "create_model", "train", &Service::create_model, On::kLoop, Cost::kRequest);
  route("POST", "get_info", "", &Service::get_info);
  route_in_order("forward_backward", &Service::forward_backward, Refusal::kPromise, On::kWorker);
  route_in_order("forward", &Service::forward, Refusal::kPromise, On::kWorker);
  route_in_order("optim_step", &Service::optim_step, Refusal::kStatus);
  route("POST", "unload_model", "train", &Service::unload_model);
  route_in_order("save_weights", &Service::save_weights, Refusal::kStatus);
  route_in_order("save_weights_for_sampler", &Service::save_weights_for_sampler, Refusal::kStatus);
  route_in_order("save_weights_external", &Service::save_weights_external, Refusal::kStatus);
  route_in_order("load_weights", &Service::load_weights, Refusal::kStatus);
  route("POST", "weights_info", "", &Service::weights_info);

  route("POST", "create_sampling_session", "sample", &Service::create_sampling_session);
  route("POST", "join_sampling_session", "sample", &Service::join_sampling_session);
  route("GET", "samplers/{id}", "", &Service::get_sampler);
  route("POST", "asample", "sample", &Service::sample, On::kWorker, Cost::kGeneration);

  route("GET", "training_runs", "", &Service::list_runs);
  route("GET", "training_runs/{run}", "", &Service::get_run);
  route("GET", "training_runs/{run}/checkpoints", "", &Service::list_run_checkpoints);
  route("GET", "checkpoints", "", &Service::list_checkpoints);
  route("GET", "training_runs/{run}/checkpoints/{id+}/external_weights_urls", "",
        &Service::external_weights_urls);
  server_.route(
      {"GET", "/api/v1/downloads/{run}/{name}/{file}",
       [this](Request&& request, const Responder& responder) { download(request, responder); },
       error_body, "", true, false});
  route("POST", "training_runs/{run}/checkpoints/{id+}/publish", "train",
        &Service::publish_checkpoint);
  route("DELETE", "training_runs/{run}/checkpoints/{id+}/publish", "train",
        &Service::unpublish_checkpoint);
  route("PUT", "training_runs/{run}/checkpoints/{id+}/ttl", "train", &Service::set_ttl);
  route("DELETE", "training_runs/{run}/checkpoints/{id+}", "train", &Service::delete_checkpoint);
  route("POST", "copy_weights", "train", &Service::copy_weights, On::kLoop, Cost::kRequest);
  route("GET", "audit", "admin", &Service::audit_log);
  for (const char* path : {"create_custom_loss", "auth/token"})
    route("POST", path, "", &Service::not_built);
  route("PUT", "sessions/{id}/project", "", &Service::not_built);
  route("DELETE", "auth/apikey/me", "", &Service::not_built);
  for (const char* path : {"sessions/{id}/trace_export", "billing/{more+}", "auth/apikey",
                           "training_runs/{run}/checkpoints/{id+}/archive"})
    route("GET", path, "", &Service::not_built);
  checkpoints_.remove_strays();
  restore();
  server_.post_after(options_.tick_s, [this] { tick(); });
}

void Service::tick() {
  try {
    look_after();
  } catch (const FileError& error) {
    log::error("{}; tried again in {} s", error.what(), options_.tick_s);
  }
  server_.post_after(options_.tick_s, [this] { tick(); });
}

void Service::look_after() {
  runs_.tick();
  promises_.sweep();
  checkpoints_.sweep();
  audit_.sweep();
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
  // Clients count numbers alone: as many bytes again are for the names and lengths of each datum.
  const auto most = static_cast<std::int64_t>(server_.options().most_body_bytes);
  responder.answer(
      200,
      dump({{"pjwt_auth_enabled", false},
            {"credential_default_source", "api_key"},
            {"parallel_fwdbwd_chunks", true},
            {"proto_compress_fwdbwd", options_.compresses_bodies},
            {"proto_write_fwdbwd", false},
            {"fwd_via_fwdbwd", false},
            {"create_model_via_load_weights", true},
            {"fwdbwd_max_chunk_len", std::clamp<std::int64_t>(most / 2 / kDatumBytes, 1, 1024)},
            {"fwdbwd_max_chunk_bytes_count", std::min<std::int64_t>(most / 2, 5'000'000)},
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

}  // namespace heddle::serve::tinker
