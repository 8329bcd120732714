#include "reward/score_queue.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace heddle::reward {

ScoreQueue::ScoreQueue(const RewardOptions& options) {
  RewardOptions one = options;
  const bool is_server = !options.http.url.empty();
  has_episodes_ = !options.environment.command.empty();
  const std::int64_t threads = is_server       ? options.http.concurrency
                               : has_episodes_ ? options.environment.workers
                                               : options.process.workers;
  at_once_ =
      is_server ? static_cast<std::size_t>(std::max<std::int64_t>(1, options.http.batch)) : 1;
  one.process.workers = std::min<std::int64_t>(1, options.process.workers);
  one.environment.workers = std::min<std::int64_t>(1, options.environment.workers);
  one.http.concurrency = std::min<std::int64_t>(1, options.http.concurrency);
  one.process.stop = one.environment.stop = one.http.stop = given_up_.get_token();
  // The first checks the options, also where they ask for no thread.
  do {
    one.process.first_worker = one.environment.first_worker = rewards_.size();
    rewards_.push_back(make_reward(one));
  } while (std::ssize(rewards_) < threads);
  waiting_.resize(has_episodes_ ? rewards_.size() : 1);
  for (std::size_t i = 0; i < rewards_.size(); ++i)
    threads_.emplace_back([this, i](const std::stop_token& stop) { work(i, stop); });
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
    std::deque<Waiting>& queue = queue_of(sample);
    queue.push_back({number, std::move(sample)});
  }
  has_work_.notify_all();
  return number;
}

std::deque<ScoreQueue::Waiting>& ScoreQueue::queue_of(const Sample& sample) {
  if (!has_episodes_) return waiting_.front();
  if (sample.ask == Ask::kOpening) {
    // The thread with the fewest episodes.
    std::vector<std::int64_t> episodes(waiting_.size());
    for (const auto& [id, thread] : thread_of_) ++episodes[thread];
    thread_of_[sample.id] =
        static_cast<std::size_t>(std::ranges::min_element(episodes) - episodes.begin());
  }
  const auto found = thread_of_.find(sample.id);
  if (found == thread_of_.end()) {
    throw_error<InternalError>("episode '{}' was not opened, or is closed", sample.id);
  }
  const std::size_t thread = found->second;
  if (sample.ask == Ask::kClosing) thread_of_.erase(found);
  return waiting_[thread];
}

std::vector<ScoreQueue::Scored> ScoreQueue::take(std::chrono::milliseconds longest) {
  std::unique_lock lock(mutex_);
  has_scores_.wait_for(lock, longest, [this] { return !scored_.empty() || failure_; });
  if (failure_) std::rethrow_exception(failure_);
  return std::exchange(scored_, {});
}

void ScoreQueue::work(std::size_t thread, const std::stop_token& stop) {
  // Workers of all threads end at the same time.
  const std::unique_ptr<Reward> own = std::move(rewards_[thread]);
  Reward& reward = *own;
  std::deque<Waiting>& waiting = waiting_[has_episodes_ ? thread : 0];
  std::unique_lock lock(mutex_);
  while (has_work_.wait(lock, stop, [&] { return !waiting.empty(); })) {
    std::vector<std::uint64_t> numbers;
    std::vector<Sample> samples;
    while (!waiting.empty() && samples.size() < at_once_) {
      numbers.push_back(waiting.front().number);
      samples.push_back(std::move(waiting.front().sample));
      waiting.pop_front();
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
    for (std::size_t i = 0; i < scores.size(); ++i) {
      if (samples[i].ask != Ask::kClosing) scored_.push_back({numbers[i], std::move(scores[i])});
    }
    has_scores_.notify_one();
    if (failure) return;
  }
}

}  // namespace heddle::reward
