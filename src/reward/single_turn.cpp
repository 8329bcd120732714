#include "reward/single_turn.h"

#include <utility>

#include "base/errors.h"

namespace heddle::reward {
namespace {

class OneTurn final : public Environment {
 public:
  explicit OneTurn(const SingleTurnTask& task) : task_(task) {}

  std::string reset(std::uint64_t, const Row& row) override {
    sample_.prompt = row.prompt;
    sample_.truth = row.truth;
    sample_.meta = row.meta;
    is_open_ = true;
    return row.prompt;
  }

  Step step(const std::string& action) override {
    if (!std::exchange(is_open_, false))
      throw_error<InternalError>("a step of an episode that is over");
    sample_.completion = action;
    const Score score = task_.judge(sample_);
    if (score.error) throw_error<DataError>("{}", *score.error);
    return {"", score.reward, true, false};
  }

 private:
  const SingleTurnTask& task_;
  Sample sample_;
  bool is_open_ = false;
};

}  // namespace

std::unique_ptr<Environment> SingleTurnTask::environment() const {
  return std::make_unique<OneTurn>(*this);
}

}  // namespace heddle::reward
