#include "serve/http/event_loop.h"

#include <event2/event.h>
#include <event2/thread.h>

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace heddle::serve {

EventLoop::EventLoop() {
  evthread_use_pthreads();
  event_config* const config = event_config_new();
  // Without it timers are rounded up to whole milliseconds, and more than once.
  if (config != nullptr) event_config_set_flag(config, EVENT_BASE_FLAG_PRECISE_TIMER);
  base_ = config == nullptr ? nullptr : event_base_new_with_config(config);
  if (config != nullptr) event_config_free(config);
  if (base_ == nullptr) throw FileError("libevent cannot make an event loop: no epoll or poll");
  wake_ = event_new(
      base_, -1, EV_PERSIST,
      [](evutil_socket_t, short, void* self) { static_cast<EventLoop*>(self)->do_posted(); }, this);
  timer_ = event_new(
      base_, -1, 0,
      [](evutil_socket_t, short, void* self) { static_cast<EventLoop*>(self)->do_due(); }, this);
}

EventLoop::~EventLoop() {
  {
    const std::lock_guard lock(mutex_);
    is_ended_ = true;
  }
  // Work that was not done may hold what posts more as it goes.
  std::exchange(posted_, {}).clear();
  std::exchange(timers_, {}).clear();
  event_free(timer_);
  event_free(wake_);
  event_base_free(base_);
}

void EventLoop::run() { event_base_loop(base_, EVLOOP_NO_EXIT_ON_EMPTY); }

void EventLoop::stop() { event_base_loopbreak(base_); }

void EventLoop::post(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    if (is_ended_) return;
    posted_.push_back(std::move(work));
  }
  event_active(wake_, EV_TIMEOUT, 0);
}

void EventLoop::post_after(double seconds, std::function<void()> work) {
  const auto due = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(seconds));
  post([this, due, work = std::move(work)]() mutable {
    timers_.emplace(due, std::move(work));
    arm();
  });
}

void EventLoop::do_posted() {
  std::deque<std::function<void()>> work;
  {
    const std::lock_guard lock(mutex_);
    work.swap(posted_);
  }
  for (const auto& item : work) item();
}

void EventLoop::do_due() {
  while (!timers_.empty() && timers_.begin()->first <= Clock::now()) {
    const auto work = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    work();
  }
  arm();
}

void EventLoop::arm() {
  if (timers_.empty()) return;
  const auto left =
      std::chrono::duration_cast<std::chrono::microseconds>(timers_.begin()->first - Clock::now());
  const auto us = std::max<std::int64_t>(0, left.count());
  constexpr std::int64_t kMicroseconds = 1'000'000;
  const timeval wait{us / kMicroseconds, us % kMicroseconds};
  evtimer_add(timer_, &wait);
}

}  // namespace heddle::serve
