#include "reward/process_reward.h"

#include "reward/wire.h"
#include "reward/worker_pool.h"

namespace heddle::reward {
namespace {

class ProcessReward final : public Reward {
 public:
  explicit ProcessReward(const ProcessOptions& options) : pool_(options), failed_(options.failed) {}

  std::vector<Score> score(std::span<const Sample> samples) override {
    std::vector<WorkerPool::Request> requests;
    for (const Sample& sample : samples)
      requests.push_back({.body = to_wire(sample), .about = sample.place});
    std::vector<Score> scores;
    for (const WorkerPool::Answer& answer : pool_.ask(requests)) {
      Score score = answer.error ? Score{0, {}, answer.error} : from_wire(answer.value);
      scores.push_back(or_failed(std::move(score), failed_));
    }
    return scores;
  }

 private:
  WorkerPool pool_;
  std::optional<double> failed_;
};

}  // namespace

std::unique_ptr<Reward> make_process_reward(const ProcessOptions& options) {
  return std::make_unique<ProcessReward>(options);
}

}  // namespace heddle::reward
