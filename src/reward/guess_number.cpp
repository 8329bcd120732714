#include "reward/guess_number.h"

#include "base/errors.h"
#include "base/json.h"
#include "reward/extract.h"
#include "reward/number.h"
#include "reward/single_turn.h"

namespace heddle::reward {
namespace {

/// The reward is 1 for the number, spread over nothing else: a guess that is no number is a turn
/// lost.
class Guessing final : public Environment {
 public:
  explicit Guessing(std::int64_t turns) : turns_(turns) {}

  std::string reset(std::uint64_t, const Row& row) override {
    if (!row.truth.is_number_integer())
      throw_error<DataError>("guess_number: the answer must be a number, found {}",
                             json::shown(row.truth));
    number_ = row.truth.get<std::int64_t>();
    turn_ = 0;
    is_open_ = true;
    return row.prompt;
  }

  Step step(const std::string& action) override {
    if (!is_open_) throw_error<InternalError>("a step of an episode that is over");
    const std::vector<Number> guesses = numbers_in(looked_at(action));
    const double guess = guesses.empty() ? 0 : guesses.back().value;
    Step step;
    if (!guesses.empty() && guess == static_cast<double>(number_)) {
      step.reward = 1;
      step.done = true;
    } else if (++turn_ == turns_) {
      step.done = step.truncated = true;
    } else if (guesses.empty()) {
      step.observation = "\nnot a number\n";
    } else {
      step.observation = guess < static_cast<double>(number_) ? "\nhigher\n" : "\nlower\n";
    }
    is_open_ = !step.done;
    return step;
  }

 private:
  std::int64_t turns_, number_ = 0, turn_ = 0;
  bool is_open_ = false;
};

class GuessNumber final : public Task {
 public:
  explicit GuessNumber(Parameters& parameters)
      : largest_(parameters.integer("largest", 100, 1, 1'000'000'000)),
        turns_(parameters.integer("turns", 8, 1, 1000)) {}

  Row row(std::uint64_t seed, std::uint64_t index) const override {
    Draws draws(seed, "guess_number", index);
    return {fmt::format("Guess my number from 1 to {} in {} turns.\n", largest_, turns_),
            draws.between(1, largest_),
            {}};
  }
  bool is_multi_turn() const override { return true; }
  std::unique_ptr<Environment> environment() const override {
    return std::make_unique<Guessing>(turns_);
  }

 private:
  std::int64_t largest_, turns_;
};

}  // namespace

std::unique_ptr<Task> make_guess_number(Parameters& parameters) {
  return std::make_unique<GuessNumber>(parameters);
}

}  // namespace heddle::reward
