#include <utility>

#include "serve/tinker/inputs.h"
#include "serve/tinker/service.h"

// Requests of runs that are refused for good. Clients number requests before they send them, so
// none waits for a number that does not come.
namespace heddle::serve::tinker {
namespace {

/// Statuses after which a client does not send the request again.
bool is_final(int status) {
  const bool is_sent_again = status == 402 || status == 408 || status == 409 || status == 429;
  return status >= 400 && status < 500 && !is_sent_again;
}

}  // namespace

void Service::route_in_order(const char* path, Method handler, Refusal refusal, On on) {
  const std::string kind = path;
  const auto answer = [this, refusal, kind](const Request& request, const Responder& responder,
                                            const std::function<void()>& work) {
    if (server_.is_draining()) throw HttpError(503, "the server ends", 5);
    try {
      work();
    } catch (const HttpError& error) {
      if (!is_final(error.status())) throw;
      refuse(request, responder, kind, refusal, error);
    } catch (const UserError& error) {
      refuse(request, responder, kind, refusal, HttpError(400, error.what()));
    }
  };
  server_.route({"POST", "/api/v1/" + kind,
                 [this, handler, answer](Request&& request, const Responder& responder) {
                   answer(request, responder, [&] { (this->*handler)(request, responder); });
                 },
                 error_body, "train", false, on == On::kWorker, Cost::kRequest,
                 [answer](Request&& request, const Responder& responder, const HttpError& error) {
                   answer(request, responder, [&] { throw error; });
                 }});
}

void Service::refuse(const Request& request, const Responder& responder, const std::string& kind,
                     Refusal refusal, const HttpError& error) {
  const Place place = read_place(
      request.body, request.header("content-type").starts_with("application/x-protobuf"));
  if (place.seq <= 0) throw error;
  if (refusal == Refusal::kStatus) {  // on the loop's thread
    if (is_run_of(request.caller, place.run)) give_place_up(place.run, place.seq);
    throw error;
  }
  on_loop(responder, [this, caller = request.caller, hash = sha256_hex(request.body), responder,
                      kind, place, error] {
    if (!is_run_of(caller, place.run)) throw error;
    const auto promise = promises_.make_failed(
        {caller.tenant, place.run, place.seq, kind, hash},
        [&](const std::string& id) {
          return dump({{"request_id", id}, {"model_id", place.run}});
        },
        error.what());
    runs_.refuse(place.run, place.seq);
    responder.answer(200, promise.answer);
  });
}

bool Service::is_run_of(const Caller& caller, const std::string& run) {
  Statement row(data_.database(), "SELECT 1 FROM run WHERE id = ? AND tenant = ?");
  return row.bind(run).bind(caller.tenant).step();
}

void Service::give_place_up(const std::string& run, std::int64_t seq) {
  if (!runs_.refuse(run, seq) || options_.durable_steps == 0) return;
  // The run goes on after a crash too, and nothing else tells that the number does not come.
  Statement(data_.database(), "INSERT OR IGNORE INTO refused(run, seq) VALUES (?, ?)")
      .bind(run)
      .bind(seq)
      .run();
}

}  // namespace heddle::serve::tinker
