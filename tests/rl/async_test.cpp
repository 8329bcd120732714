// Whole runs of `heddle rl` in mode async: staleness, order, and what the counts say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "base/errors.h"
#include "base/hash.h"
#include "base/text.h"
#include "rl/rl_fixture.h"

namespace heddle {
namespace {

TEST_F(RlTest, AsyncWithoutStalenessIsSyncBitForBit) {
  std::set<std::string> all = {files::read(dir_ / "model" / "model.safetensors")};
  for (const char* seed : {"0", "7"}) {
    const Words settings = {std::string("train.seed=") + seed, "rl.dynamic_sampling=true",
                            "rollout.max_sequences=5"};
    const auto weights_of = [&](const std::string& name, const Words& more) {
      Words words = settings;
      words.insert(words.end(), more.begin(), more.end());
      train(run(name + seed, words));
      return weights(name + seed);
    };
    const std::string sync = weights_of("sync", {});
    EXPECT_EQ(weights_of("async", {"rl.mode=async", "rl.max_staleness=0"}), sync) << seed;
    EXPECT_NE(weights_of("stale", {"rl.mode=async", "rl.max_staleness=1"}), sync) << seed;
    EXPECT_TRUE(all.insert(sync).second) << seed;
  }
}

TEST_F(RlTest, ADeterministicRunConsumesInTheOrderOfItsPrompts) {
  // Completions of many lengths.
  const Words settings = {"rl.mode=async",
                          "rl.max_staleness=2",
                          "train.max_steps=6",
                          "rollout.max_sequences=24",
                          "rollout.max_new_tokens=16",
                          "rollout.stop=[e, a]"};
  // The groups of each step, as the ledger has them.
  const auto consumed = [&](const std::string& name, const Words& more) {
    Words all = settings;
    all.insert(all.end(), more.begin(), more.end());
    train(run(name, all));
    std::vector<std::vector<std::int64_t>> steps;
    for (const std::string& line : text::split(files::read(dir_ / name / "ledger.log"), '\n')) {
      if (line.find("\"consumed\"") == std::string::npos) continue;
      const auto record = nlohmann::json::parse(line.substr(line.find('{')));
      steps.push_back(record.at("consumed").at("groups").get<std::vector<std::int64_t>>());
    }
    EXPECT_EQ(steps.size(), 6u) << name;
    return steps;
  };
  const auto ordered = consumed("ordered", {"rl.deterministic=true"});
  for (std::size_t i = 0; i < ordered.size(); ++i) {
    const auto first = static_cast<std::int64_t>(4 * i);
    EXPECT_EQ(ordered[i], (std::vector<std::int64_t>{first, first + 1, first + 2, first + 3}));
  }
  EXPECT_NE(consumed("free", {}), ordered);
}

TEST_F(RlTest, ADeterministicRunRefusesWhatClocksDecide) {
  const auto message = [&](Words more) {
    more.insert(more.begin(), {"rl.deterministic=true", "rl.mode=async"});
    return testing::message_of([&] { run("refused", more); });
  };
  EXPECT_THAT(message({"rl.stale_policy=drop"}),
              ::testing::HasSubstr("rl.stale_policy: drop leaves out whichever groups are late"));
  EXPECT_THAT(message({"rl.rollout_ranks=1"}),
              ::testing::HasSubstr("expected wait with rl.deterministic and rl.rollout_ranks"));
  EXPECT_THAT(message({"device.name=cuda"}), ::testing::HasSubstr("expected train.deterministic"));
  for (const char* fine : {"rl.update_mode=wait", "rl.max_staleness=0"})
    run("fine", {"rl.deterministic=true", "rl.mode=async", "rl.rollout_ranks=1", fine});
}

TEST_F(RlTest, StalenessIsBounded) {
  for (const char* mode : {"recompute", "wait", "abort"}) {
    const Reports reports =
        train(run(std::string("stale-") + mode,
                  {"rl.mode=async", "rl.max_staleness=2", fmt::format("rl.update_mode={}", mode),
                   "train.max_steps=8", "rollout.max_sequences=5", "rl.old_logprobs=recompute"}));
    double largest = 0, of_new = 0, of_old = 0;
    for (const train::StepInfo& step : reports.steps) {
      largest = std::max(largest, step.metrics.at("staleness_max"));
      if (const double* k3 = step.metrics.find("mismatch_k3_age_0")) of_new = std::max(of_new, *k3);
      for (const char* age : {"mismatch_k3_age_1", "mismatch_k3_age_2"})
        if (const double* k3 = step.metrics.find(age)) of_old = std::max(of_old, *k3);
    }
    EXPECT_LE(largest, 2) << mode;
    // Tokens of the weights in training differ by rounding alone.
    EXPECT_LT(of_new, 1e-6) << mode;
    if (std::string(mode) != "abort") {
      EXPECT_GT(largest, 0) << mode;
      EXPECT_GT(of_old, 1e-5) << mode;
    }
    EXPECT_EQ(reports.steps.size(), 8u) << mode;
  }
}

TEST_F(RlTest, AStalenessWithoutEndDispatchesNoMoreThanCanRun) {
  for (const char* more : {"rl.update_mode=recompute", "rl.update_mode=wait", "rl.update_mode=keep",
                           "rl.update_mode=abort", "rl.deterministic=true", "train.method=lora"}) {
    const Words settings = {"rl.mode=async", "rl.max_staleness=1000000000000000", more};
    const Reports reports = train(run(std::string("endless-") + more, settings));
    ASSERT_EQ(reports.steps.size(), 5u) << more;
    for (const train::StepInfo& step : reports.steps) {
      // Groups of four: four run, those that wait have 16 sequences, and one was a group more.
      EXPECT_LE(step.metrics.at("groups_running"), 4 + 4 + 1) << more;
      EXPECT_EQ(step.metrics.at("capacity"), 0) << more;
    }
  }
}

TEST_F(RlTest, ATopKAboveTheVocabularyIsAllOfIt) {
  const auto rewards = [&](const std::string& name, const char* top_k) {
    const Reports reports = train(run(name, {top_k}));
    return std::pair(reports.mean("reward_mean", 0, 5), reports.mean("gen_tokens", 0, 5));
  };
  EXPECT_EQ(rewards("most", "rollout.top_k=1000000000"), rewards("all", "rollout.top_k=0"));
}

TEST_F(RlTest, CountsOfGenerationAddUp) {
  const Reports reports = train(run("counts"));
  for (const train::StepInfo& step : reports.steps) {
    const Metrics& found = step.metrics;
    // One of four completions of each of four prompts reads all but the prompt's last token.
    const double prompts = (static_cast<double>(step.tokens) - found.at("gen_tokens")) / 4;
    EXPECT_EQ(found.at("gen_prefill_saved"), 3 * (prompts - 4));
    EXPECT_GT(found.at("gen_batch"), 1);
    EXPECT_LE(found.at("gen_batch"), 16);
    EXPECT_EQ(found.at("gen_recorded"), 0);  // on the CPU
    EXPECT_EQ(found.at("gen_preempted"), 0);
    EXPECT_EQ(found.at("ledger_consumed"), 4.0 * static_cast<double>(step.step));
    EXPECT_EQ(found.at("ledger_rejected"), 0);
    EXPECT_EQ(found.at("ledger_pending"), 0);
    double k3 = 0;
    for (const char* depth : {"0", "1", "2", "3"}) {
      const double* part = found.find(std::string("mismatch_k3_depth_") + depth);
      if (part != nullptr) k3 = std::max(k3, *part);
    }
    EXPECT_GE(k3 * (1 + 1e-9), found.at("mismatch_k3"));
  }
}

TEST_F(RlTest, CountsOfModeAsyncAddUp) {
  const auto reports = [&](const std::string& name, Words more) {
    // Completions of many lengths, so that some run at each update.
    more.insert(more.begin(),
                {"rl.mode=async", "rl.max_staleness=2", "train.max_steps=8",
                 "rollout.max_sequences=5", "rollout.max_new_tokens=24", "rollout.stop=[e, a]"});
    return train(run(name, more)).steps;
  };
  const auto largest = [](const std::vector<train::StepInfo>& steps, const char* name) {
    double most = 0;
    for (const train::StepInfo& step : steps) {
      if (const double* value = step.metrics.find(name)) most = std::max(most, *value);
    }
    return most;
  };
  const auto steps = reports("usual", {});
  for (const train::StepInfo& step : steps) {
    double groups = 0;
    for (const char* age : {"0", "1", "2"}) {
      const double* count = step.metrics.find(std::string("staleness_groups_") + age);
      groups += count != nullptr ? *count : 0;
    }
    EXPECT_EQ(groups, 4);
    EXPECT_EQ(step.metrics.at("capacity"), 0);
    EXPECT_GE(step.metrics.at("queue_age_s"), 0);
    EXPECT_EQ(step.metrics.at("ledger_pending"),
              step.metrics.at("groups_running") + step.metrics.at("groups_queued"));
    EXPECT_LE(step.metrics.at("span_mean"), step.metrics.at("span_max"));
  }
  EXPECT_GT(largest(steps, "queue_age_s"), 0);
  // A sequence that runs at an update is read again.
  EXPECT_GT(largest(steps, "gen_preempted"), 0);
  EXPECT_EQ(largest(reports("kept", {"rl.update_mode=keep"}), "gen_preempted"), 0);
  // Twelve groups might be under way before the first batch is cut, eight after it.
  const auto few = reports("few", {"rl.max_inflight_groups=2"});
  EXPECT_GT(few.front().metrics.at("capacity"), 0);
  EXPECT_LE(largest(few, "capacity"), 8);
  const auto dropped =
      reports("dropped", {"rl.stale_policy=drop", "rl.max_staleness=1", "rl.groups_per_step=2"});
  EXPECT_GT(largest(dropped, "rejected_stale"), 0);
  EXPECT_GT(largest(dropped, "rejected_stale_tokens"), 0);
  // A group is four completions of 24 tokens at most.
  EXPECT_LE(largest(dropped, "rejected_stale_tokens"), 96);
}

TEST_F(RlTest, MemoryThatIsReleasedForTrainingChangesNoBit) {
  for (const Words& settings :
       {Words{}, Words{"rl.mode=async", "rl.max_staleness=2"},
        Words{"rl.mode=async", "rl.max_staleness=2", "rl.update_mode=abort"}}) {
    std::set<std::string> found;
    for (const char* releases : {"false", "true"}) {
      Words all = {"rollout.max_sequences=5", "rollout.max_new_tokens=24", "rollout.stop=[e, a]",
                   std::string("rollout.release_memory=") + releases};
      all.insert(all.end(), settings.begin(), settings.end());
      const std::string name = fmt::format("released-{}-{}", releases, settings.size());
      train(run(name, all));
      found.insert(weights(name));
    }
    EXPECT_EQ(found.size(), 1u) << settings.size();
  }
}

TEST_F(RlTest, MemoryOfSequencesThatGoOnIsNotReleased) {
  const auto message = [&](Words more) {
    more.insert(more.begin(), {"rollout.release_memory=true", "rl.mode=async"});
    return testing::message_of([&] { run("refused", more); });
  };
  EXPECT_THAT(message({"rl.update_mode=keep"}),
              ::testing::HasSubstr("rollout.release_memory: takes the caches that rl.update_mode "
                                   "keep lets running sequences go on from"));
  EXPECT_THAT(message({"rl.update_mode=pin", "train.method=lora"}),
              ::testing::HasSubstr("rl.update_mode pin lets"));
  // Nothing runs when the weights change.
  run("fine", {"rollout.release_memory=true", "rl.mode=async", "rl.update_mode=keep",
               "rl.max_staleness=0"});
}

TEST_F(RlTest, AGroupThatIsTooOldInItsLastAttemptIsRejected) {
  // One epoch of the 24 prompts, with completions of many lengths.
  const auto train_with = [&](const char* attempts) {
    const std::string name = std::string("attempts-") + attempts;
    ::testing::internal::CaptureStderr();
    const Reports reports =
        train(run(name, {"rl.mode=async", "rl.max_staleness=1", "rl.stale_policy=drop",
                         std::string("rl.stale_attempts=") + attempts, "train.max_steps=0",
                         "train.epochs=1", "rl.groups_per_step=2", "rollout.max_sequences=5",
                         "rollout.max_new_tokens=24", "rollout.stop=[e, a]"}));
    const std::string log = ::testing::internal::GetCapturedStderr();
    double dropped = 0;
    for (const train::StepInfo& step : reports.steps) dropped += step.metrics.at("rejected_stale");
    const rl::LedgerState state = rl::Ledger(dir_ / name / "ledger.log").state();
    const auto found = state.rejected.find(rl::Rejection::kStale);
    const std::int64_t rejected = found == state.rejected.end() ? 0 : found->second;
    // Each prompt is consumed or rejected, once: the ledger refuses anything else.
    EXPECT_TRUE(state.pending.empty()) << name;
    EXPECT_EQ(state.consumed + rejected, 24) << name;
    // A line for each prompt that is left out.
    std::int64_t lines = 0;
    for (const std::string& line : text::split(log, '\n'))
      lines += line.find("older than rl.max_staleness 1 and are dropped") != std::string::npos;
    EXPECT_EQ(lines, rejected) << name << log;
    return std::pair(rejected, static_cast<std::int64_t>(dropped));
  };
  const auto [rejected, dropped] = train_with("1");
  EXPECT_GT(rejected, 0);
  EXPECT_EQ(rejected, dropped);
  const auto [rejected_later, dropped_more] = train_with("2");
  EXPECT_LT(rejected_later, rejected);
  EXPECT_GE(dropped_more, 2 * rejected_later);
  EXPECT_EQ(train_with("100").first, 0);
}

// Groups that are left out are prompts that no step has: the epoch counts them, and a run of epochs
// that ends before its steps says so.
TEST_F(RlTest, AnEpochWhoseGroupsAreFilteredEndsEarlyAndSaysSo) {
  ::testing::internal::CaptureStderr();
  const Reports reports = train(run("short", {"rl.dynamic_sampling=true", "rl.max_attempts=100",
                                              "train.max_steps=0", "train.epochs=2"}));
  const std::string said = ::testing::internal::GetCapturedStderr();
  ASSERT_FALSE(reports.steps.empty());
  ASSERT_LT(reports.steps.size(), 12u);
  EXPECT_THAT(said,
              ::testing::HasSubstr(fmt::format("the run ends with step {} of 12: train.epochs "
                                               "2 has no more prompts",
                                               reports.steps.size())));
  double before = 0;
  for (const train::StepInfo& step : reports.steps) {
    EXPECT_GT(step.epoch, before);
    before = step.epoch;
  }
  // More than the steps' share of the rows.
  EXPECT_GT(before, static_cast<double>(reports.steps.size()) / 6);
  EXPECT_LE(before, 2);
  EXPECT_EQ(rl::Ledger(dir_ / "short" / "ledger.log").state().epoch, 1) << "from 0";
}

}  // namespace
}  // namespace heddle
