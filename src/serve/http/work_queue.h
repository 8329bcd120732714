#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace heddle::serve {

/// One thread that does what it is given, in order.
class WorkQueue {
 public:
  WorkQueue() : thread_([this] { run(); }) {}
  /// Does what was given before, then ends the thread.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  /// The work must not throw.
  void add(std::function<void()> work);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace heddle::serve
