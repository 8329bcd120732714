#include "reward/environment_reward.h"

#include <map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/log.h"
#include "reward/wire.h"
#include "reward/worker_pool.h"

namespace heddle::reward {
namespace {

class EnvironmentReward final : public Reward {
 public:
  explicit EnvironmentReward(const ProcessOptions& options)
      : key_(options.key), pool_(options), failed_(options.failed) {}

  std::vector<Score> score(std::span<const Sample> samples) override {
    std::vector<WorkerPool::Request> requests;
    std::vector<std::size_t> asked;
    std::vector<Score> scores(samples.size());
    for (std::size_t i = 0; i < samples.size(); ++i) {
      const Sample& sample = samples[i];
      if (sample.ask == Ask::kOpening) episodes_[sample.id] = next_++;
      const auto episode = episodes_.find(sample.id);
      if (episode != episodes_.end()) {
        requests.push_back(request(episode->second, episode_to_wire(sample), sample.place));
        asked.push_back(i);
      } else if (sample.ask == Ask::kScore) {
        scores[i] = or_failed({.error = "the worker that had its episode has ended"}, failed_);
        scores[i].is_lost = true;
      }
    }
    std::vector<Request> closing;
    std::vector<WorkerPool::Answer> answers = pool_.ask(requests);
    for (std::size_t k = 0; k < asked.size(); ++k) {
      const Sample& sample = samples[asked[k]];
      if (answers[k].was_unasked && sample.ask == Ask::kOpening) {
        // An episode that has not begun may begin in the next worker.
        const std::int64_t episode = episodes_[sample.id];
        forget(*requests[k].worker, sample.id);
        episodes_[sample.id] = episode;
        answers[k] = pool_.ask({requests[k]}).front();
      }
      if (answers[k].error) {
        forget(*requests[k].worker, sample.id);
        if (sample.ask == Ask::kScore) {
          scores[asked[k]] = or_failed({.error = answers[k].error}, failed_);
          scores[asked[k]].is_lost = answers[k].was_unasked;
        }
        if (sample.ask == Ask::kOpening) scores[asked[k]].error = answers[k].error;
        continue;
      }
      const auto episode = episodes_.find(sample.id);
      if (sample.ask == Ask::kClosing) {
        if (episode != episodes_.end()) episodes_.erase(episode);
        continue;
      }
      Score score = episode_from_wire(answers[k].value, sample.ask);
      if (sample.ask == Ask::kScore) {
        if (!score.goes_on() && episode != episodes_.end()) {
          closing.push_back(request(episode->second, {{"op", "close"}}, sample.place));
          episodes_.erase(episode);
        }
        score = or_failed(std::move(score), failed_);
      }
      scores[asked[k]] = std::move(score);
    }
    // One that has ended meanwhile has forgotten its episodes.
    if (!closing.empty()) {
      const std::vector<WorkerPool::Answer> closed = pool_.ask(closing);
      for (std::size_t k = 0; k < closed.size(); ++k) {
        if (closed[k].error) forget(*closing[k].worker, "");
      }
    }
    return scores;
  }

 private:
  using Request = WorkerPool::Request;

  Request request(std::int64_t episode, Json body, const std::string& place) const {
    body["episode"] = episode;
    std::string about = fmt::format("op {} of episode {}{}", body["op"].get<std::string>(), episode,
                                    place.empty() ? "" : ", " + place);
    return {std::move(body), worker_of(episode), std::move(about)};
  }
  std::size_t worker_of(std::int64_t episode) const {
    return static_cast<std::size_t>(episode) % pool_.size();
  }
  /// The worker has ended, and with it its episodes, of which `own` is the one that it was asked
  /// about; they are asked about no more.
  void forget(std::size_t worker, const std::string& own) {
    episodes_.erase(own);
    const std::size_t others = std::erase_if(
        episodes_, [&](const auto& episode) { return worker_of(episode.second) == worker; });
    if (others == 0) return;
    log::warning("{}: {} other episodes of that worker are lost; their prompts are played anew",
                 key_, others);
  }

  std::string key_;
  WorkerPool pool_;
  std::optional<double> failed_;
  std::map<std::string, std::int64_t> episodes_;  ///< Under way, by Sample::id.
  std::int64_t next_ = 0;
};

}  // namespace

std::unique_ptr<Reward> make_environment_reward(const ProcessOptions& options) {
  return std::make_unique<EnvironmentReward>(options);
}

}  // namespace heddle::reward
