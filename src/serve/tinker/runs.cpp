#include "serve/tinker/runs.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/log.h"
#include "serve/tinker/wire.h"

namespace heddle::serve::tinker {
namespace {

/// The work's exception as an outcome.
template <class Work>
Outcome guarded(const Work& work) {
  try {
    return work();
  } catch (const UserError& error) {
    return Outcome::failure(error.what(), "user");
  } catch (const HttpError& error) {
    return Outcome::failure(error.what(), "user");
  } catch (const std::exception& error) {
    log::error("an operation on the model fails: {}", error.what());
    return Outcome::failure("internal error of the server", "server");
  }
}

BatchedTensor batched(const std::vector<tenants::DatumOutput>& data,
                      std::vector<float> tenants::DatumOutput::*field) {
  BatchedTensor tensor;
  tensor.offsets.push_back(0);
  for (const tenants::DatumOutput& datum : data) {
    tensor.data += as_bytes(datum.*field);
    tensor.offsets.push_back(static_cast<std::int64_t>(tensor.data.size()));
  }
  return tensor;
}

}  // namespace

Outcome outcome_of(const tenants::WorkResult& result) {
  if (!result.error.empty()) return Outcome::failure(result.error, "user");
  ForwardBackwardOutput output;
  output.num_datums = static_cast<std::int64_t>(result.data.size());
  output.fields["logprobs"] = batched(result.data, &tenants::DatumOutput::logprobs);
  const bool has_losses = std::ranges::any_of(
      result.data, [](const auto& datum) { return !datum.elementwise_loss.empty(); });
  if (has_losses)
    output.fields["elementwise_loss"] =
        batched(result.data, &tenants::DatumOutput::elementwise_loss);
  output.metrics = result.metrics;
  return Outcome::proto(encode(output));
}

Runs::Runs(Server& server, ModelThread& model, Promises& promises, const Options& options)
    : server_(server), model_(model), promises_(promises), options_(options) {}

std::int64_t Runs::count(const std::string& tenant) const {
  return std::ranges::count_if(runs_,
                               [&](const auto& each) { return each.second.tenant == tenant; });
}

std::int64_t Runs::waiting() const {
  std::int64_t count = 0;
  for (const auto& [id, run] : runs_) count += static_cast<std::int64_t>(run.waiting.size());
  return count;
}

void Runs::open(const std::string& run, const std::string& tenant, Operation first,
                std::int64_t first_seq) {
  Run& made = runs_[run];
  made.tenant = tenant;
  made.next_seq = first_seq - 1;
  first.seq = made.next_seq;
  made.waiting.emplace(first.seq, std::move(first));
  pump_soon();
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
  if (entry.waiting.empty()) entry.blocked_since = Clock::now();
  entry.waiting_bytes += operation.bytes;
  entry.waiting.emplace(operation.seq, std::move(operation));
  pump_soon();
}

void Runs::fail_waiting(Run& run, const std::string& message) {
  if (run.waiting.empty()) return;
  run.next_seq = run.waiting.rbegin()->first + 1;
  run.waiting_bytes = 0;
  for (auto& [seq, operation] : std::exchange(run.waiting, {})) {
    Outcome outcome = Outcome::failure(message, "user");
    if (operation.then) operation.then(outcome);
    promises_.finish(operation.promise, outcome);
  }
}

void Runs::release(tenants::SetId set) {
  model_.run([set](Backend& backend) {
    guarded([&] {
      backend.remove(set);
      return Outcome();
    });
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
}

void Runs::tick() {
  for (auto& [id, run] : runs_) {
    if (run.waiting.empty() || run.is_running || is_ready(run)) {
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

bool Runs::is_ready(const Run& run) const {
  return !run.is_running && !run.is_closed && run.waiting.contains(run.next_seq);
}

std::vector<std::string> Runs::ready_runs() const {
  std::vector<std::string> ready;
  for (const auto& [id, run] : runs_) {
    if (is_ready(run)) ready.push_back(id);
  }
  const auto served = [this](const std::string& id) {
    const auto found = served_.find(runs_.at(id).tenant);
    return found == served_.end() ? 0 : found->second;
  };
  std::ranges::stable_sort(ready, {}, served);
  return ready;
}

void Runs::pump_soon() {
  if (is_pump_due_) return;
  is_pump_due_ = true;
  const auto pump_now = [this] {
    is_pump_due_ = false;
    pump();
  };
  if (runs_.size() > 1) {
    server_.post_after(options_.join_s, pump_now);
  } else {
    server_.post(pump_now);
  }
}

Runs::Running Runs::take(const std::string& id) {
  Run& run = runs_.at(id);
  auto node = run.waiting.extract(run.next_seq);
  run.is_running = true;
  run.waiting_bytes -= node.mapped().bytes;
  Running running{id, std::move(node.mapped()), {}, run.set};
  // A tenant that comes back from a pause has no claim on the time it did not use.
  std::int64_t least = INT64_MAX;
  for (const auto& [other, each] : runs_)
    if (const auto found = served_.find(each.tenant); found != served_.end())
      least = std::min(least, found->second);
  auto& served = served_.try_emplace(run.tenant, least == INT64_MAX ? 0 : least).first->second;
  served += std::max<std::int64_t>(1, running.operation.tokens);
  return running;
}

void Runs::pump() {
  if (is_busy_ || is_draining_) return;
  const auto ready = ready_runs();
  if (ready.empty()) return;
  is_busy_ = true;
  auto batch = std::make_shared<std::vector<Running>>();
  batch->push_back(take(ready.front()));
  if (batch->front().operation.before) {
    Running& first = batch->front();
    first.outcome = guarded([&] {
      first.operation.before();
      return Outcome();
    });
    if (first.outcome.is_failed) return done(*batch);
  }
  if (batch->front().operation.work) {
    std::int64_t tokens = batch->front().operation.tokens;
    for (std::size_t i = 1; i < ready.size(); ++i) {
      const Run& run = runs_.at(ready[i]);
      const Operation& next = run.waiting.at(run.next_seq);
      if (!next.work || tokens + next.tokens > options_.pass_tokens) continue;
      tokens += next.tokens;
      batch->push_back(take(ready[i]));
    }
  }
  model_.run([this, batch](Backend& backend) {
    Running& first = batch->front();
    if (first.operation.work) {
      const Outcome failure = guarded([&] {
        std::vector<tenants::Work> works;
        for (Running& running : *batch) {
          if (!running.set)
            throw_error<DataError>("run {} has no weights: it could not be made", running.run);
          works.push_back(std::move(*running.operation.work));
          works.back().set = *running.set;
        }
        const auto results = backend.forward_backward(works);
        for (std::size_t i = 0; i < batch->size(); ++i)
          (*batch)[i].outcome = outcome_of(results[i]);
        return Outcome();
      });
      if (failure.is_failed)
        for (Running& running : *batch) running.outcome = failure;
    } else if (first.operation.make) {
      first.outcome = guarded([&] {
        const auto old = std::exchange(first.set, first.operation.make(backend));
        if (old) backend.remove(*old);
        return Outcome();
      });
    } else {
      first.outcome = guarded([&] {
        if (!first.set)
          throw_error<DataError>("run {} has no weights: it could not be made", first.run);
        return first.operation.act(backend, *first.set);
      });
    }
    server_.post([this, batch] { done(*batch); });
  });
}

void Runs::done(std::vector<Running>& finished) {
  is_busy_ = false;
  for (Running& running : finished) {
    if (running.operation.work) trained_tokens_ += running.operation.tokens;
    if (running.operation.then) running.operation.then(running.outcome);
    promises_.finish(running.operation.promise, running.outcome);
    if (running.operation.after && !running.outcome.is_failed) running.operation.after();
    const auto found = runs_.find(running.run);
    Run& run = found->second;
    run.set = running.set;
    run.is_running = false;
    run.next_seq = std::max(run.next_seq, running.operation.seq + 1);
    run.blocked_since = Clock::now();
    if (run.is_closed) {
      if (run.set) release(*run.set);
      runs_.erase(found);
    }
  }
  pump();
}

}  // namespace heddle::serve::tinker
