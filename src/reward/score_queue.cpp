#include "reward/score_queue.h"

#include <algorithm>
#include <utility>

namespace heddle::reward {

ScoreQueue::ScoreQueue(const RewardOptions& options) {
  RewardOptions one = options;
  const bool is_server = !options.http.url.empty();
  const std::int64_t threads = is_server ? options.http.concurrency : options.process.workers;
  at_once_ =
      is_server ? static_cast<std::size_t>(std::max<std::int64_t>(1, options.http.batch)) : 1;
  one.process.workers = std::min<std::int64_t>(1, options.process.workers);
  one.http.concurrency = std::min<std::int64_t>(1, options.http.concurrency);
  one.process.stop = one.http.stop = given_up_.get_token();
  // The first checks the options, also where they ask for no thread.
  do {
    rewards_.push_back(make_reward(one));
  } while (std::ssize(rewards_) < threads);
  for (const auto& reward : rewards_) {
    threads_.emplace_back([this, &reward](const std::stop_token& stop) { work(*reward, stop); });
  }
}

ScoreQueue::~ScoreQueue() {
  given_up_.request_stop();
  for (std::jthread& thread : threads_) thread.request_stop();
}

std::uint64_t ScoreQueue::submit(Sample sample) {
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = submitted_++;
    waiting_.push_back({number, std::move(sample)});
  }
  has_work_.notify_one();
  return number;
}

std::vector<ScoreQueue::Scored> ScoreQueue::take(std::chrono::milliseconds longest) {
  std::unique_lock lock(mutex_);
  has_scores_.wait_for(lock, longest, [this] { return !scored_.empty() || failure_; });
  if (failure_) std::rethrow_exception(failure_);
  return std::exchange(scored_, {});
}

void ScoreQueue::work(Reward& reward, const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (has_work_.wait(lock, stop, [this] { return !waiting_.empty(); })) {
    std::vector<std::uint64_t> numbers;
    std::vector<Sample> samples;
    while (!waiting_.empty() && samples.size() < at_once_) {
      numbers.push_back(waiting_.front().number);
      samples.push_back(std::move(waiting_.front().sample));
      waiting_.pop_front();
    }
    lock.unlock();
    std::vector<Score> scores;
    std::exception_ptr failure;
    try {
      scores = reward.score(samples);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (stop.stop_requested()) return;
    if (failure) failure_ = failure;
    for (std::size_t i = 0; i < scores.size(); ++i)
      scored_.push_back({numbers[i], std::move(scores[i])});
    has_scores_.notify_one();
    if (failure) return;
  }
}

}  // namespace heddle::reward
