#include <utility>

#include "serve/tinker/service.h"

// Operations of runs, from their requests to their promises.
namespace heddle::serve::tinker {
namespace {

/// Requests that nothing waits for are written together with those that come within it: each wait
/// for the disk keeps the loop from others.
constexpr double kGather_s = 0.0005;

}  // namespace

void Service::submit(const Request& request, const Responder& responder, const std::string& run,
                     Operation operation) {
  Promises::Submission submission{request.caller.tenant, run, operation.seq, operation.kind,
                                  sha256_hex(request.body)};
  // A request without a number has no place in the order of a replay.
  if (operation.seq >= 0) submission.body = kept_body(request);
  submitted_.push_back(
      {std::move(submission), std::move(operation), responder, request.meter, request.is_replay});
  submitted_runs_.insert(run);
  if (!runs_.may_take_later(submitted_runs_)) {
    server_.post([this] { promise_submitted(); });
  } else if (submitted_.size() == 1) {
    server_.post_after(kGather_s, [this] { promise_submitted(); });
  }
}

void Service::promise_submitted() {
  std::vector<Submitted> all = std::exchange(submitted_, {});
  submitted_runs_.clear();
  if (all.empty()) return;  // those for which a moment was waited did not need it
  std::vector<std::optional<Promises::Promise>> promises(all.size());
  try {
    Transaction entered(data_.database());
    for (std::size_t i = 0; i < all.size(); ++i) promises[i] = promise(all[i]);
    entered.commit();
  } catch (...) {
    // An error of one is taken for all: none is written, and the clients send all of them again.
    const std::exception_ptr reason = std::current_exception();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (promises[i] && promises[i]->is_new) promises_.forget(promises[i]->id);
      answering(all[i].responder, [&] { std::rethrow_exception(reason); });
    }
    return;
  }
  for (std::size_t i = 0; i < all.size(); ++i)
    if (promises[i]) answering(all[i].responder, [&] { accept(all[i], *promises[i]); });
}

std::optional<Promises::Promise> Service::promise(Submitted& submitted) {
  const std::string& run = submitted.submission.owner;
  const Operation& operation = submitted.operation;
  const auto answer = [&](const std::string& id) {
    return dump({{"request_id", id}, {"model_id", run}});
  };
  try {
    if (submitted.is_replay) runs_.check(run, operation.seq, operation.bytes);
    // A repeat gets its promise also where the run no longer takes new requests.
    return promises_.make(submitted.submission, [&](const std::string& id) {
      runs_.check(run, operation.seq, operation.bytes);
      if (operation.check) operation.check();
      return answer(id);
    });
  } catch (const HttpError& error) {
    if (error.status() != 404 || operation.seq < 0 || submitted.is_replay) {
      answering(submitted.responder, [] { throw; });
      return std::nullopt;
    }
    // The client may have sent this call in several requests, and expects a promise for each.
    submitted.failure = Outcome::failure(error.what(), "server");
  }
  submitted.submission.body.clear();
  const auto promise = promises_.make(submitted.submission, answer);
  try {
    promises_.store(promise.id, *submitted.failure);
  } catch (...) {
    promises_.forget(promise.id);
    throw;
  }
  return promise;
}

void Service::accept(Submitted& submitted, const Promises::Promise& promise) {
  Operation& operation = submitted.operation;
  if (submitted.failure) {
    promises_.tell(promise.id, *submitted.failure);
  } else if (promise.is_new || submitted.is_replay) {
    operation.promise = promise.id;
    operation.meter = std::move(submitted.meter);
    const std::string& run = submitted.submission.owner;
    promises_.on_wait(promise.id, [this, run] { return runs_.queue_state(run); });
    runs_.add(run, std::move(operation));
  }
  submitted.responder.answer(200, promise.answer);
}

}  // namespace heddle::serve::tinker
