#include "serve/model/model_thread.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "base/log.h"

namespace heddle::serve {

namespace {

constexpr double kTokenTime_s = 0.1;  ///< Far more than any device needs for a token.

}  // namespace

ModelThread::ModelThread(std::unique_ptr<Backend> backend, Observer observer)
    : backend_(std::move(backend)),
      observer_(std::move(observer)),
      facts_(backend_->facts()),
      thread_([this] { loop(); }) {}

ModelThread::~ModelThread() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void ModelThread::run(std::function<void(Backend&)> job, std::int64_t tokens) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back({std::move(job), tokens});
  }
  changed_.notify_one();
}

void ModelThread::begin_turn(std::int64_t tokens) {
  const std::lock_guard lock(mutex_);
  turn_ = Turn{std::chrono::steady_clock::now(), tokens};
}

void ModelThread::end_turn() {
  const std::lock_guard lock(mutex_);
  turn_.reset();
}

std::optional<double> ModelThread::overdue(double turn_s,
                                           std::chrono::steady_clock::time_point now) const {
  const std::lock_guard lock(mutex_);
  if (!turn_) return std::nullopt;
  const double taken_s = std::chrono::duration<double>(now - turn_->begun).count();
  if (taken_s <= turn_s + kTokenTime_s * static_cast<double>(turn_->tokens)) return std::nullopt;
  return taken_s;
}

void ModelThread::give(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    requests_.push_back(std::move(work));
  }
  changed_.notify_one();
}

GenerationId ModelThread::generate(Generation generation, GenerationEvents events) {
  const GenerationId id = next_id_++;
  ++generations_;
  give([this, id, generation = std::move(generation), events = std::move(events)]() mutable {
    start(id, generation, std::move(events));
  });
  return id;
}

void ModelThread::cancel(GenerationId id) {
  give([this, id] {
    const auto found =
        std::ranges::find_if(active_, [&](const auto& entry) { return entry.second.id == id; });
    if (found == active_.end()) return;
    backend_->abort(found->first);
    active_.erase(found);
    --generations_;
  });
}

void ModelThread::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] {
      return is_ending_ || !jobs_.empty() || !requests_.empty() || backend_->is_generating();
    });
    if (is_ending_) break;
    const auto requests = std::exchange(requests_, {});
    Job job;
    if (!jobs_.empty()) {
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    lock.unlock();
    for (const auto& request : requests) request();
    if (job.work) {
      begin_turn(job.tokens);
      job.work(*backend_);
      end_turn();
    }
    if (backend_->is_generating()) {
      begin_turn(0);
      step();
      end_turn();
    }
    if (observer_) observe();
    lock.lock();
  }
  lock.unlock();
  fail_all("the server ends");
}

void ModelThread::observe() {
  ModelQueue queue = backend_->queue();
  {
    const std::lock_guard lock(mutex_);
    queue.jobs = static_cast<std::int64_t>(jobs_.size());
  }
  observer_(backend_->take_passes(), queue);
}

void ModelThread::start(GenerationId id, const Generation& generation, GenerationEvents events) {
  try {
    const GenerationId own = backend_->submit(generation);
    active_[own] = {id, std::move(events)};
  } catch (const std::exception& error) {
    --generations_;
    const bool is_users = dynamic_cast<const UserError*>(&error) != nullptr;
    if (!is_users) log::error("a generation does not start: {}", error.what());
    events.on_failed(is_users ? error.what() : "internal error", is_users);
  }
}

void ModelThread::step() {
  std::vector<Backend::Event> events;
  try {
    events = backend_->step();
  } catch (const DeviceError& error) {
    fail_all(error.what());
    return;
  } catch (const std::exception& error) {
    log::error("generation stops: {}", error.what());
    fail_all("internal error in a pass of the model");
    return;
  }
  for (Backend::Event& event : events) {
    const auto found = active_.find(event.id);
    if (found == active_.end()) continue;
    if (event.token && found->second.events.on_token) found->second.events.on_token(*event.token);
    if (!event.failure.empty()) {
      const auto on_failed = std::move(found->second.events.on_failed);
      active_.erase(found);
      --generations_;
      log::warning("a generation fails: {}", event.failure);
      on_failed(event.failure, event.is_users);
      continue;
    }
    if (!event.result) continue;
    const auto done = std::move(found->second.events.on_done);
    active_.erase(found);
    --generations_;
    done(std::move(*event.result));
  }
}

void ModelThread::fail_all(const std::string& message) {
  for (auto& [own, active] : std::exchange(active_, {})) {
    backend_->abort(own);
    --generations_;
    active.events.on_failed(message, false);
  }
}

}  // namespace heddle::serve
