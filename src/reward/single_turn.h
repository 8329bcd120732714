#pragma once

#include <memory>
#include <string_view>

#include "base/rng.h"
#include "reward/environment.h"

namespace heddle::reward {

/// Random numbers of one row, in the order in which they are asked for.
class Draws {
 public:
  Draws(std::uint64_t seed, std::string_view task, std::uint64_t row)
      : random_(seed, task), next_(row << 20) {}  // a row draws fewer than 2^20 numbers
  std::uint64_t below(std::uint64_t bound) { return random_.below(next_++, bound); }
  std::int64_t between(std::int64_t least, std::int64_t most) {
    return least + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(most - least + 1)));
  }
  double uniform() { return random_.uniform(next_++); }

 private:
  CounterRng random_;
  std::uint64_t next_;
};

/// A task of one question and one answer.
class SingleTurnTask : public Task {
 public:
  virtual Score judge(const Sample& sample) const = 0;
  /// Uses this task for its life.
  std::unique_ptr<Environment> environment() const override;
};

}  // namespace heddle::reward
