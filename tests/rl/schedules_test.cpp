#include <unistd.h>

#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "schedule.h"

namespace heddle::rl::testing {
namespace {

/// A ledger in memory where the system has such a folder: a schedule flushes it at every step.
class LedgerPath {
 public:
  LedgerPath() {
    const std::filesystem::path memory = "/dev/shm";
    path_ =
        (std::filesystem::is_directory(memory) ? memory : std::filesystem::temp_directory_path()) /
        ("heddle-schedules-" + std::to_string(::getpid()));
  }
  ~LedgerPath() { std::filesystem::remove(path_); }
  LedgerPath(const LedgerPath&) = delete;
  LedgerPath& operator=(const LedgerPath&) = delete;

  const std::filesystem::path& fresh() const {
    std::filesystem::remove(path_);
    return path_;
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

Plan random_plan(std::uint64_t seed) {
  const CounterRng random(seed, "plan");
  std::uint64_t drawn = 0;
  const auto below = [&](std::uint64_t bound) {
    return static_cast<std::int64_t>(random.below(drawn++, bound));
  };
  const auto rate = [&](double most) { return below(3) == 0 ? 0 : most * random.uniform(drawn++); };
  Plan plan;
  plan.admission.max_staleness = below(5);
  plan.admission.groups_per_batch = 1 + below(4);
  plan.admission.max_inflight = below(3) == 0 ? 1 + below(6) : 0;
  plan.admission.policy = below(2) == 0 ? StalePolicy::kWait : StalePolicy::kDrop;
  plan.rows = 1 + below(30);
  plan.max_attempts = 1 + below(4);
  plan.aborts_at_update = below(3) == 0;
  plan.failing = rate(0.3);
  plan.filtered = rate(0.3);
  plan.rollout_dies = rate(0.02);
  plan.trainer_dies = rate(0.02);
  plan.pauses = rate(0.1);
  plan.longest = 1 + below(60);
  plan.update_delay = below(4) == 0 ? below(8) : 0;
  plan.steps_per_checkpoint = 1 + below(4);
  plan.admission.in_order = below(2) == 0;
  return plan;
}

/// Bound, no deadlock, each row consumed or rejected once, and the file says so as well.
void expect_guarantees(std::uint64_t seed, const LedgerPath& ledger) {
  const Plan plan = random_plan(seed);
  const Outcome outcome = Schedule(plan, seed, ledger.fresh()).run();
  ASSERT_TRUE(outcome.is_finished) << "seed " << seed;
  ASSERT_LE(outcome.max_staleness, plan.admission.max_staleness) << "seed " << seed;
  ASSERT_EQ(static_cast<std::int64_t>(outcome.consumed.size() + outcome.rejected.size()), plan.rows)
      << "seed " << seed;
  for (const auto& [cursor, times] : outcome.consumed) {
    ASSERT_EQ(times, 1) << "seed " << seed << " cursor " << cursor;
    ASSERT_FALSE(outcome.rejected.contains(cursor)) << "seed " << seed << " cursor " << cursor;
  }
  const LedgerState state = Ledger(ledger.path()).state();
  ASSERT_EQ(state.consumed, static_cast<std::int64_t>(outcome.consumed.size())) << "seed " << seed;
  ASSERT_TRUE(state.pending.empty()) << "seed " << seed;
}

TEST(Schedules, KeepTheBoundAndLoseNothing) {
  const LedgerPath ledger;
  for (std::uint64_t seed = 0; seed < 500; ++seed) expect_guarantees(seed, ledger);
}

TEST(SlowSchedules, KeepTheBoundAndLoseNothing) {
  const LedgerPath ledger;
  for (std::uint64_t seed = 0; seed < 100'000; ++seed) expect_guarantees(seed, ledger);
}

TEST(Schedules, UseTheStalenessThatTheyMay) {
  const LedgerPath ledger;
  Plan plan;
  plan.rows = 200;
  plan.longest = 60;
  plan.admission.groups_per_batch = 4;
  for (const std::int64_t staleness : {0, 1, 2, 4}) {
    plan.admission.max_staleness = staleness;
    EXPECT_EQ(Schedule(plan, 3, ledger.fresh()).run().max_staleness, staleness);
  }
}

/// Mean length of what was trained on.
double consumed_length(Schedule& schedule, Outcome& outcome) {
  outcome = schedule.run();
  EXPECT_TRUE(outcome.is_finished);
  double total = 0;
  for (const auto& [cursor, times] : outcome.consumed)
    total += static_cast<double>(schedule.length_of(cursor, 0));
  return total / static_cast<double>(outcome.consumed.size());
}

TEST(Schedules, WaitHasNoLengthBiasAndDropPrefersTheShort) {
  const LedgerPath ledger;
  Plan plan;
  plan.rows = 400;
  plan.longest = 80;
  plan.max_attempts = 2;
  plan.admission.groups_per_batch = 4;
  plan.admission.max_staleness = 1;
  Outcome waited, dropped;
  Schedule wait(plan, 5, ledger.fresh());
  const double all = consumed_length(wait, waited);
  // Every row was trained on under its first attempt: the lengths are those that were offered.
  EXPECT_EQ(waited.consumed.size(), 400u);
  EXPECT_EQ(waited.attempts, 1);
  plan.admission.policy = StalePolicy::kDrop;
  Schedule drop(plan, 5, ledger.fresh());
  EXPECT_LT(consumed_length(drop, dropped), all);
  EXPECT_FALSE(dropped.rejected.empty());
  EXPECT_LE(dropped.attempts, plan.max_attempts);
}

}  // namespace
}  // namespace heddle::rl::testing
