#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
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
  /// Gives up what is under way. Takes as long as workers have to end by themselves, at most.
  ~ScoreQueue();
  ScoreQueue(const ScoreQueue&) = delete;
  ScoreQueue& operator=(const ScoreQueue&) = delete;

  /// Queues a sample and returns its number, which its score comes with; one with Ask::kClosing has
  /// none. Samples of one id in an environment go to one thread, in their order.
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
  void work(std::size_t thread, const std::stop_token& stop);
  std::deque<Waiting>& queue_of(const Sample& sample);

  std::size_t at_once_;  ///< Samples that a thread takes together, at most.
  std::stop_source given_up_;
  std::mutex mutex_;
  std::condition_variable_any has_work_;
  std::condition_variable has_scores_;
  bool has_episodes_;
  /// For all threads, or of an environment by thread.
  std::vector<std::deque<Waiting>> waiting_;
  std::map<std::string, std::size_t> thread_of_;  ///< By Sample::id, of episodes under way.
  std::vector<Scored> scored_;
  std::exception_ptr failure_;
  std::uint64_t submitted_ = 0;
  std::vector<std::unique_ptr<Reward>> rewards_;
  std::vector<std::jthread> threads_;  ///< Last: they use the rest.
};

}  // namespace heddle::reward
