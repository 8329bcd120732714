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
    std::vector<Request> requests;
    std::vector<std::size_t> asked;
    std::vector<Score> scores(samples.size());
    for (std::size_t i = 0; i < samples.size(); ++i) {
      const Sample& sample = samples[i];
      if (sample.ask == Ask::kOpening) episodes_[sample.id] = {next_++};
      const auto episode = episodes_.find(sample.id);
      if (episode != episodes_.end()) {
        requests.push_back(request(episode->second, episode_to_wire(sample), sample.place));
        asked.push_back(i);
      } else if (sample.ask == Ask::kScore) {
        scores[i] = lost();
      }
    }
    std::vector<Request> closing;
    const std::vector<WorkerPool::Answer> answers = pool_.ask(requests);
    for (std::size_t k = 0; k < asked.size(); ++k)
      scores[asked[k]] = take(samples[asked[k]], answers[k], closing);
    for (const WorkerPool::Answer& closed : pool_.ask(closing)) {
      if (closed.error) forget(closed);
    }
    return scores;
  }

 private:
  using Request = WorkerPool::Request;

  struct Episode {
    std::int64_t number;
    std::int64_t process = -1;  ///< The one that has its state.
  };

  /// `closing`: gets the request that ends the episode, if it is over.
  Score take(const Sample& sample, const WorkerPool::Answer& answer,
             std::vector<Request>& closing) {
    const auto episode = episodes_.find(sample.id);
    const bool is_known = episode != episodes_.end();
    if (answer.error) {
      if (is_known) episodes_.erase(episode);
      forget(answer);
      if (sample.ask == Ask::kClosing) return {};
      if (answer.was_unasked) return lost();
      return sample.ask == Ask::kScore ? or_failed({.error = answer.error}, failed_)
                                       : Score{.error = answer.error};
    }
    if (sample.ask == Ask::kClosing) {
      if (is_known) episodes_.erase(episode);
      return {};
    }
    Score score = episode_from_wire(answer.value, sample.ask);
    if (sample.ask == Ask::kOpening) {
      if (is_known) episode->second.process = answer.process;
      return score;
    }
    if (!score.goes_on() && is_known) {
      closing.push_back(request(episode->second, {{"op", "close"}}, sample.place));
      episodes_.erase(episode);
    }
    return or_failed(std::move(score), failed_);
  }

  /// By another one's fault.
  Score lost() const {
    Score score = or_failed({.error = "the worker that had its episode has ended"}, failed_);
    score.is_lost = true;
    return score;
  }

  Request request(const Episode& episode, Json body, const std::string& place) const {
    body["episode"] = episode.number;
    std::string about = fmt::format("op {} of episode {}{}", body["op"].get<std::string>(),
                                    episode.number, place.empty() ? "" : ", " + place);
    const auto worker = static_cast<std::size_t>(episode.number) % pool_.size();
    return {std::move(body), worker, std::move(about), episode.process};
  }

  /// The process that was asked has ended, and with it its episodes; they are asked about no more.
  void forget(const WorkerPool::Answer& answer) {
    const std::size_t others = std::erase_if(episodes_, [&](const auto& episode) {
      return episode.second.process == answer.process && answer.process >= 0;
    });
    if (others == 0) return;
    log::warning("{}: {} other episodes of that worker are lost; their prompts are played anew",
                 key_, others);
  }

  std::string key_;
  WorkerPool pool_;
  std::optional<double> failed_;
  std::map<std::string, Episode> episodes_;  ///< Under way, by Sample::id.
  std::int64_t next_ = 0;
};

}  // namespace

std::unique_ptr<Reward> make_environment_reward(const ProcessOptions& options) {
  return std::make_unique<EnvironmentReward>(options);
}

}  // namespace heddle::reward
