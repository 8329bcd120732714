#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <unordered_set>

struct evconnlistener;

namespace heddle::serve {

class EventLoop;

/// Keeps descriptors free for files and for clients that ask something. Whoever reaches the port
/// may open connections and say nothing, or a byte now and then, before any key is looked at: where
/// seven of eight descriptors are taken, the connections without a whole request are closed. What
/// was asked is answered, and an honest client connects again.
class Crowd {
 public:
  /// `answered`: the descriptors of the connections whose requests are being answered. The loop and
  /// the listener must outlive it.
  Crowd(EventLoop& loop, evconnlistener* listener,
        std::function<std::unordered_set<int>()> answered);
  ~Crowd();
  Crowd(const Crowd&) = delete;
  Crowd& operator=(const Crowd&) = delete;

 private:
  void look_later();
  void look();

  EventLoop& loop_;
  evconnlistener* listener_;
  std::function<std::unordered_set<int>()> answered_;
  std::shared_ptr<bool> is_alive_ = std::make_shared<bool>(true);
  std::chrono::steady_clock::time_point next_warning_;
};

}  // namespace heddle::serve
