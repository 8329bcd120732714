#include <memory>
#include <utility>

#include "base/errors.h"
#include "reward/environment.h"
#include "reward/single_turn.h"
#include "reward/verifiers.h"

namespace heddle::reward {
namespace {

class OneTurnVerifier final : public Verifier {
 public:
  explicit OneTurnVerifier(std::shared_ptr<const SingleTurnTask> task) : task_(std::move(task)) {}
  Score judge(const Sample& sample) const override { return task_->judge(sample); }

 private:
  std::shared_ptr<const SingleTurnTask> task_;
};

/// Plays the episode anew up to the turn that is judged, so that nothing is kept between turns and
/// any rank and any start of a run judges alike.
class EpisodeVerifier final : public Verifier {
 public:
  explicit EpisodeVerifier(std::shared_ptr<const Task> task) : task_(std::move(task)) {}

  Score judge(const Sample& sample) const override {
    try {
      const std::unique_ptr<Environment> episode = task_->environment();
      episode->reset(0, {sample.prompt, sample.truth, sample.meta});
      for (const PastTurn& turn : sample.turns) episode->step(turn.completion);
      const Step step = episode->step(sample.completion);
      Score score;
      score.reward = step.reward;
      if (!step.done) score.observation = step.observation;
      return score;
    } catch (const DataError& error) {
      return {0, {}, error.what()};
    }
  }

 private:
  std::shared_ptr<const Task> task_;
};

}  // namespace

std::unique_ptr<Verifier> make_task_verifier(std::shared_ptr<const Task> task) {
  if (auto single = std::dynamic_pointer_cast<const SingleTurnTask>(task))
    return std::make_unique<OneTurnVerifier>(std::move(single));
  return std::make_unique<EpisodeVerifier>(std::move(task));
}

}  // namespace heddle::reward
