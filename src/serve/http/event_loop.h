#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

struct event;
struct event_base;

namespace heddle::serve {

/// libevent's loop with a queue of work for its thread and timers.
class EventLoop {
 public:
  EventLoop();
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  event_base* base() const { return base_; }
  void run();  ///< Until stop(), which runs on the loop's thread.
  void stop();

  // From any thread; the work must not throw.
  void post(std::function<void()> work);
  void post_after(double seconds, std::function<void()> work);

 private:
  using Clock = std::chrono::steady_clock;
  void do_posted();
  void do_due();
  void arm();

  event_base* base_;
  event* wake_;
  event* timer_;
  std::mutex mutex_;
  bool is_ended_ = false;
  std::deque<std::function<void()>> posted_;
  std::multimap<Clock::time_point, std::function<void()>> timers_;  ///< For the loop's thread.
};

}  // namespace heddle::serve
