#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reward/reward.h"

namespace heddle::reward {

/// Several processes of the user that answer requests, one JSON object a line each way. A request
/// has an `id`, which the answer repeats; answers may come in any order.
///
///     ask() --> thread of the pool --> worker 0 ... k-1     (stdin, stdout)
///
/// A worker that ends, writes something else, or is late with one answer is ended and started anew.
/// Its requests go to another worker once, and then have failed.
class WorkerPool {
 public:
  /// Starts nothing yet.
  explicit WorkerPool(const ProcessOptions& options);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  struct Request {
    Json body;  ///< Without `id`.
    /// This worker and no other, and only once: for requests that follow from earlier ones.
    std::optional<std::size_t> worker = {};
    std::string about = {};  ///< Names the row for messages: "prompts.jsonl:7".
    /// The process that answered the earlier ones (Answer::process); -1: any.
    std::int64_t process = -1;
  };
  struct Answer {
    Json value = nullptr;
    std::optional<std::string> error = {};
    std::int64_t process = -1;  ///< Number of the process that was asked, from 0 on.
    bool was_unasked = false;   ///< Request::process had ended before.
  };
  /// Waits for all answers; each is there after 2 x (start_timeout_s + timeout_s) for every request
  /// that a worker has to do before. Throws ConfigError if the program cannot be started. From one
  /// thread at a time.
  std::vector<Answer> ask(const std::vector<Request>& requests);
  std::size_t size() const;

 private:
  class Loop;
  class OwnThread;
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<OwnThread> thread_;
};

}  // namespace heddle::reward
