#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "reward/reward.h"

namespace heddle::reward {

/// Judges samples while the caller does something else: on threads, each of which has a Reward of
/// its own. A program has a thread for each worker, a server one for each request at once.
class ScoreQueue {
 public:
  /// Throws ConfigError as make_reward() does.
  explicit ScoreQueue(const RewardOptions& options);
  /// Gives up what is under way, within half a second.
  ~ScoreQueue();
  ScoreQueue(const ScoreQueue&) = delete;
  ScoreQueue& operator=(const ScoreQueue&) = delete;

  /// Queues a sample and returns its number, which its score comes with.
  std::uint64_t submit(Sample sample);

  struct Scored {
    std::uint64_t number;
    Score score;
  };
  /// Samples that were judged since the last call, in the order in which their scores came. Waits
  /// so long for the first. Throws what stopped a thread: the program cannot be started.
  std::vector<Scored> take(std::chrono::milliseconds longest);

 private:
  struct Waiting {
    std::uint64_t number;
    Sample sample;
  };
  void work(Reward& reward, const std::stop_token& stop);

  std::size_t at_once_;  ///< Samples that a thread takes together, at most.
  std::stop_source given_up_;
  std::mutex mutex_;
  std::condition_variable_any has_work_;
  std::condition_variable has_scores_;
  std::deque<Waiting> waiting_;
  std::vector<Scored> scored_;
  std::exception_ptr failure_;
  std::uint64_t submitted_ = 0;
  std::vector<std::unique_ptr<Reward>> rewards_;
  std::vector<std::jthread> threads_;  ///< Last: they use the rest.
};

}  // namespace heddle::reward
