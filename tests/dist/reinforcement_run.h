#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "dist/launched_run.h"
#include "rl/ledger.h"

namespace heddle {

using Words = std::vector<std::string>;

/// Runs of `heddle rl` in processes of their own.
class ReinforcementTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kGroups = 4;

  ReinforcementTest() {
    std::ofstream rows(runs_.directory() / "prompts.jsonl");
    for (int i = 0; i < 24; ++i)
      rows << nlohmann::json{{"prompt", "say " + std::to_string(i)}, {"answer", "k"}} << "\n";
  }

  Words command(const std::string& run, int ranks, const Words& more) const {
    Words words;
    if (ranks > 0) {
      words = {"launch", "--nproc", std::to_string(ranks), "--log-dir", log_dir(run), "--"};
    }
    words.push_back("rl");
    Words settings = {"data.train=" + (runs_.directory() / "prompts.jsonl").string(),
                      "train.max_steps=5",
                      "optim.lr=1e-3",
                      "optim.warmup_steps=0",
                      "rl.groups_per_step=" + std::to_string(kGroups),
                      "rl.samples_per_group=4",
                      "rollout.max_new_tokens=6",
                      "parallel.timeout_s=30",
                      "sync.timeout_s=20",
                      "sync.bucket_bytes=4096"};
    const auto is_reward = [](const std::string& word) {
      return word.starts_with("rl.reward.command") || word.starts_with("rl.reward.url");
    };
    if (std::none_of(more.begin(), more.end(), is_reward))
      settings.push_back("rl.reward.verifiers.contains=1");
    settings.insert(settings.end(), more.begin(), more.end());
    for (const std::string& word : runs_.overrides(run, "dense", settings)) {
      if (!word.starts_with("data.truncation") && !word.starts_with("train.global_batch_size"))
        words.push_back(word);
    }
    return words;
  }
  std::filesystem::path checkpoints(const std::string& run) const {
    return runs_.directory() / run / "checkpoints";
  }
  std::string log_dir(const std::string& run) const {
    return (runs_.directory() / (run + ".logs")).string();
  }
  int train(const std::string& run, int ranks, const Words& more) const {
    return testing::wait_for(testing::start_heddle(command(run, ranks, more), runs_.log_of(run)));
  }
  std::string weights(const std::string& run) const {
    return files::read(runs_.directory() / run / "final" / "model.safetensors");
  }
  std::vector<nlohmann::json> metrics(const std::string& run) const {
    std::vector<nlohmann::json> rows;
    std::ifstream file(runs_.directory() / run / "metrics.jsonl");
    // A row without its end is being written.
    for (std::string line; std::getline(file, line) && !file.eof();)
      rows.push_back(nlohmann::json::parse(line));
    return rows;
  }
  /// Every group up to the last one is consumed by one step, or rejected, or still pending.
  void expect_ledger(const std::string& run, std::int64_t steps) const {
    const rl::Ledger ledger(runs_.directory() / run / "ledger.log");
    const rl::LedgerState& state = ledger.state();
    EXPECT_EQ(state.step, steps) << run;
    EXPECT_EQ(state.version, steps) << run;
    EXPECT_EQ(state.consumed, steps * kGroups) << run;
    std::int64_t rejected = 0;
    for (const auto& [reason, count] : state.rejected) rejected += count;
    EXPECT_EQ(state.consumed + rejected + std::ssize(state.pending), state.next_cursor) << run;
  }

  /// The figures of each step are those of the other run, to 1e-8 of them.
  static void expect_same(const std::vector<nlohmann::json>& found,
                          const std::vector<nlohmann::json>& other,
                          std::initializer_list<const char*> figures, const std::string& run) {
    ASSERT_EQ(found.size(), other.size()) << run;
    for (std::size_t i = 0; i < other.size(); ++i) {
      for (const char* const figure : figures) {
        const double expected = other[i].at(figure);
        EXPECT_NEAR(found[i].at(figure).get<double>(), expected, 1e-8 * (1 + std::abs(expected)))
            << run << " " << i << " " << figure;
      }
    }
  }

  /// The trainer's time is in its parts, and what it and the rollouts have waited are shares. A
  /// single step may stand still between its parts.
  static void expect_times(const std::vector<nlohmann::json>& rows, const std::string& run) {
    double all_parts = 0, all_steps = 0;
    for (const nlohmann::json& row : rows) {
      double parts = 0;
      for (const char* part : {"wait_s", "sync_s", "prepare_s", "update_s", "record_s"}) {
        EXPECT_GE(row.at(part), 0) << run << " " << part;
        parts += row.at(part).get<double>();
      }
      EXPECT_LE(parts, row.at("step_s")) << run;
      all_parts += parts;
      all_steps += row.at("step_s").get<double>();
      for (const char* idle : {"idle_trainer", "idle_rollout"}) {
        EXPECT_GE(row.at(idle), 0) << run;
        EXPECT_LE(row.at(idle), 1) << run;
      }
    }
    EXPECT_GT(all_parts, 0.7 * all_steps) << run;
  }

  testing::LaunchedRuns runs_;
};

}  // namespace heddle
