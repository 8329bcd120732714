#include "serve/model/model_thread.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "base/log.h"

namespace heddle::serve {

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

void ModelThread::run(std::function<void(Backend&)> job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_one();
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
    std::function<void(Backend&)> job;
    if (!jobs_.empty()) {
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    lock.unlock();
    for (const auto& request : requests) request();
    if (job) job(*backend_);
    if (backend_->is_generating()) step();
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
  } catch (const std::exception& error) {
    log::error("generation stops: {}", error.what());
    fail_all("internal error in a pass of the model");
    return;
  }
  for (Backend::Event& event : events) {
    const auto found = active_.find(event.id);
    if (found == active_.end()) continue;
    if (event.token && found->second.events.on_token) found->second.events.on_token(*event.token);
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
