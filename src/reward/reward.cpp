#include "reward/reward.h"

#include "base/errors.h"
#include "base/text.h"

namespace heddle::reward {
namespace {

/// 1 for a completion that equals the answer, spaces around both left aside; else 0.
class Exact : public Reward {
 public:
  explicit Exact(double weight) : weight_(weight) {}
  std::vector<Score> score(std::span<const Sample> samples) override {
    std::vector<Score> scores;
    for (const Sample& sample : samples) {
      const std::string truth =
          sample.truth.is_string() ? sample.truth.get<std::string>() : sample.truth.dump();
      const bool is_equal = text::trim(sample.completion) == text::trim(truth);
      scores.push_back({.reward = is_equal ? weight_ : 0});
    }
    return scores;
  }

 private:
  double weight_;
};

}  // namespace

std::unique_ptr<Reward> make_reward(const RewardOptions& options) {
  if (options.verifiers.size() != 1 || options.verifiers[0].verifier != "exact")
    throw ConfigError("rl.reward.verifiers: only exact is built");
  return std::make_unique<Exact>(options.verifiers[0].weight);
}

}  // namespace heddle::reward
