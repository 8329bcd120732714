#include "rl/experience.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "config/config.h"
#include "objective/advantages.h"
#include "rl/policy_options.h"
#include "testing/message_of.h"
#include "testing/paths.h"
#include "testing/temporary_directory.h"

namespace heddle::rl {
namespace {

class ExperienceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    tokenizer_ = data::Tokenizer::load(testing::source_path("examples/tokenizer-4k"));
    std::ofstream rows(dir_ / "prompts.jsonl");
    for (int i = 0; i < 6; ++i)
      rows << R"({"prompt": "count to )" << std::string(static_cast<std::size_t>(i + 1), '9')
           << R"(", "answer": ")" << i << "\"}\n";
  }

  config::RunConfig config(std::vector<std::string> more = {}) const {
    std::vector<std::string> all = {"train.objective=policy",
                                    "model.path=none",
                                    "data.train=" + (dir_ / "prompts.jsonl").string(),
                                    "data.max_length=64",
                                    "rollout.max_new_tokens=8",
                                    "rl.reward.verifiers.exact=1",
                                    "data.shuffle=false"};
    all.insert(all.end(), more.begin(), more.end());
    return config::load("", all);
  }
  Prompts prompts(const config::RunConfig& config) const {
    return Prompts(config, train::DataPart::kTrain, *tokenizer_);
  }

  /// Two groups of two: completions of 3, 8 (truncated), 1 and 5 tokens.
  static std::vector<Group> groups() {
    std::vector<Group> all(2);
    const std::vector<std::int64_t> lengths = {3, 8, 1, 5};
    const std::vector<double> rewards = {1, 0, 1, 1};
    for (std::size_t i = 0; i < 4; ++i) {
      Group& group = all[i / 2];
      group.row = group.cursor = static_cast<std::int64_t>(i / 2);
      Trajectory& trajectory = group.trajectories.emplace_back();
      for (std::int64_t t = 0; t < lengths[i]; ++t) {
        trajectory.tokens.push_back(static_cast<std::int32_t>(100 * i + t));
        trajectory.logprobs.push_back(-0.1 * static_cast<double>(t + 1));
        trajectory.versions.push_back(0);
      }
      trajectory.is_truncated = lengths[i] == 8;
      trajectory.reward = rewards[i];
    }
    return all;
  }

  testing::TemporaryDirectory dir_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
};

TEST_F(ExperienceTest, ExpertsStandAtTheTokensThatChoseThem) {
  const config::RunConfig run = config({"data.max_length=32", "train.micro_batch_tokens=32"});
  const Prompts all = prompts(run);
  std::vector<Group> batch = groups();
  constexpr std::int64_t kWidth = 6;
  const auto chosen = [](std::size_t row, std::int64_t token, std::int64_t entry) {
    return static_cast<std::uint16_t>(100 * (static_cast<std::int64_t>(row) + 1) + 7 * token +
                                      entry);
  };
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 0; i < 4; ++i) {
    Trajectory& trajectory = batch[i / 2].trajectories[i % 2];
    lengths.push_back(std::ssize(all.row(batch[i / 2].row).tokens) + std::ssize(trajectory.tokens));
    for (std::int64_t t = 0; t + 1 < lengths[i]; ++t) {
      for (std::int64_t e = 0; e < kWidth; ++e) trajectory.experts.push_back(chosen(i, t, e));
    }
  }
  const data::Step step = Experience(run, all, batch, kWidth).step(0, 0, 1);
  ASSERT_GT(step.micro_batches.size(), 1u);
  std::size_t rows = 0;
  for (const data::Batch& micro : step.micro_batches) {
    ASSERT_EQ(micro.experts.sizes(), (std::vector{kWidth, micro.size()}));
    for (std::size_t s = 0; s < micro.row_ids.size(); ++s, ++rows) {
      const auto row = static_cast<std::size_t>(micro.row_ids[s]);
      for (std::int64_t t = 0; t < lengths[row]; ++t) {
        // The last token's are those of the one before.
        const std::int64_t from = std::min(t, lengths[row] - 2);
        for (std::int64_t e = 0; e < kWidth; ++e) {
          EXPECT_EQ(micro.experts[e][micro.cu_seqlens_host[s] + t].item<std::int64_t>(),
                    chosen(row, from, e));
        }
      }
    }
  }
  EXPECT_EQ(rows, 4u);

  EXPECT_FALSE(Experience(run, all, batch).step(0, 0, 1).micro_batches[0].experts.defined());
  std::vector<std::uint16_t>& experts = batch[1].trajectories[1].experts;
  experts.resize(experts.size() - kWidth);
  EXPECT_NE(testing::message_of([&] {
              Experience(run, all, batch, kWidth);
            }).find("group 1, completion 1: experts of"),
            std::string::npos);
}

TEST_F(ExperienceTest, ColumnsStandAtTheLabelsOfTheCompletion) {
  const config::RunConfig run = config();
  const Prompts all = prompts(run);
  const std::vector<Group> batch = groups();
  const Experience experience(run, all, batch);
  const std::vector<objective::PolicyRow> rows = experience.policy_rows(0);
  const data::Step step = experience.step(4, 0, 1);
  EXPECT_EQ(step.step, 4);
  EXPECT_EQ(step.loss_rows, 3 + 8 + 1 + 5);
  EXPECT_EQ(step.sequences, 4);
  std::set<std::int64_t> seen;
  for (const data::Batch& micro : step.micro_batches) {
    EXPECT_LE(micro.size(), 64);
    for (std::int64_t s = 0; s < micro.real_sequences; ++s) {
      const auto i = static_cast<std::size_t>(s);
      const auto row = static_cast<std::size_t>(micro.row_ids[i]);
      EXPECT_TRUE(seen.insert(micro.row_ids[i]).second);
      const Trajectory& trajectory = batch[row / 2].trajectories[row % 2];
      std::size_t next = 0;
      for (std::int64_t t = micro.cu_seqlens_host[i]; t < micro.cu_seqlens_host[i + 1]; ++t) {
        const auto place = static_cast<std::size_t>(t - micro.cu_seqlens_host[i]);
        if (micro.loss_weights[t].item<float>() == 0) continue;
        ASSERT_LT(next, trajectory.tokens.size());
        EXPECT_EQ(micro.labels[t].item<std::int64_t>(), trajectory.tokens[next]);
        EXPECT_EQ(rows[row].old[place], trajectory.logprobs[next]);
        ++next;
      }
      EXPECT_EQ(next, trajectory.tokens.size());
    }
  }
  EXPECT_EQ(seen.size(), 4u);
  // (R - mean) / (std + 1e-6) of {1, 0}; the second group is uniform.
  EXPECT_NEAR(rows[0].advantages[rows[0].advantages.size() - 2], std::sqrt(0.5), 1e-5);
  EXPECT_NEAR(rows[1].advantages[rows[1].advantages.size() - 2], -std::sqrt(0.5), 1e-5);
  EXPECT_EQ(rows[3].advantages[rows[3].advantages.size() - 2], 0);
}

TEST_F(ExperienceTest, ObservationsAreReadAndNotTrained) {
  std::vector<Group> batch = groups();
  Trajectory& turns = batch[0].trajectories[1];
  turns.sampled = {1, 1, 1, 0, 0, 1, 1, 1};
  const config::RunConfig run = config();
  const Prompts all = prompts(run);
  const Experience experience(run, all, batch);
  const data::Step step = experience.step(0, 0, 1);
  EXPECT_EQ(step.loss_rows, 3 + 6 + 1 + 5);
  const std::int64_t prompt = std::ssize(all.row(0).tokens);
  for (const data::Batch& micro : step.micro_batches) {
    for (std::size_t s = 0; s < micro.row_ids.size(); ++s) {
      if (micro.row_ids[s] != 1) continue;
      const std::int64_t begin = micro.cu_seqlens_host[s] + prompt - 1;
      for (std::int64_t t = 0; t < 8; ++t) {
        const bool is_drawn = turns.sampled[static_cast<std::size_t>(t)] != 0;
        EXPECT_EQ(micro.loss_weights[begin + t].item<float>(), is_drawn ? 1 : 0) << t;
        EXPECT_EQ(micro.labels[begin + t].item<std::int64_t>(),
                  is_drawn ? turns.tokens[static_cast<std::size_t>(t)] : data::kIgnoredLabel);
        // The policy reads what it was told.
        EXPECT_EQ(micro.tokens[begin + t + 1].item<std::int64_t>(),
                  turns.tokens[static_cast<std::size_t>(t)]);
      }
    }
  }
  // Whitened over the tokens that were drawn: their mean is 0.
  const config::RunConfig whitened = config({"rl.algorithm.advantage=reinforce++_baseline"});
  const auto rows = Experience(whitened, all, batch).policy_rows(0);
  double sum = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    const Trajectory& trajectory = batch[i / 2].trajectories[i % 2];
    const std::size_t first = all.row(batch[i / 2].row).tokens.size() - 1;
    for (std::size_t t = 0; t < trajectory.tokens.size(); ++t)
      sum += trajectory.is_sampled(t) ? rows[i].advantages[first + t] : 0;
  }
  EXPECT_NEAR(sum, 0, 1e-9);
}

TEST_F(ExperienceTest, RanksShareTheRowsEqually) {
  const config::RunConfig run = config();
  const Prompts all = prompts(run);
  const std::vector<Group> batch = groups();
  const Experience experience(run, all, batch);
  std::multiset<std::int64_t> seen;
  std::set<std::size_t> counts;
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    const data::Step step = experience.step(0, rank, 3);
    counts.insert(step.micro_batches.size());
    for (const data::Batch& micro : step.micro_batches)
      seen.insert(micro.row_ids.begin(), micro.row_ids.end());
    EXPECT_EQ(step.loss_rows, 17);
  }
  EXPECT_EQ(counts.size(), 1u);
  EXPECT_EQ(seen, (std::multiset<std::int64_t>{0, 1, 2, 3}));
}

TEST_F(ExperienceTest, OverlongCompletionsArePunishedOrMasked) {
  const config::RunConfig punished =
      config({"rl.overlong=punish", "rl.overlong_buffer=4", "rl.overlong_penalty=0.5"});
  const Prompts all = prompts(punished);
  const std::vector<Group> batch = groups();
  // Lengths 3, 8, 1, 5 of 8: beyond 4 are 4 and 1 tokens.
  EXPECT_EQ(Experience(punished, all, batch).rewards(),
            (std::vector<double>{1, -0.5, 1, 1 - 0.125}));

  const config::RunConfig masked = config({"rl.overlong=mask"});
  const Experience experience(masked, all, batch);
  EXPECT_EQ(experience.step(0, 0, 1).loss_rows, 3 + 1 + 5);
  EXPECT_EQ(experience.step(0, 0, 1).sequences, 3);
  // It stays in the mean of its group.
  EXPECT_NEAR(experience.policy_rows(0)[0].advantages.back(), 0, 1e-12);
  EXPECT_GT(experience.policy_rows(0)[0].advantages[experience.tokens()[0].size() - 2], 0.5);
}

TEST_F(ExperienceTest, ShuffledRewardsAreThoseOfOthers) {
  const config::RunConfig run = config({"rl.reward.shuffle=true"});
  const Prompts all = prompts(run);
  std::vector<Group> batch = groups();
  for (std::size_t i = 0; i < 4; ++i)
    batch[i / 2].trajectories[i % 2].reward = static_cast<double>(i);
  std::vector<double> rewards = Experience(run, all, batch).rewards();
  std::ranges::sort(rewards);
  EXPECT_EQ(rewards, (std::vector<double>{0, 1, 2, 3}));
}

TEST_F(ExperienceTest, WhatIsRejectedLeavesTheStepAndWeightsHaveAMean) {
  const config::RunConfig run = config({"rl.groups_per_step=1", "rl.sync_every=2"});
  const Prompts all = prompts(run);
  std::vector<Group> batch = groups();
  batch[0].trajectories[1].sampled = {1, 1, 1, 0, 0, 1, 1, 1};
  const std::vector<std::vector<double>> rhos = {
      {0.5, 4, 1}, {1, 1, 0.25, 1, 1, 3, 1, 1}, {8}, {1, 1, 1, 1, 1}};
  const auto corrected = [&](const objective::PolicyOptions& options) {
    Experience experience(run, all, batch);
    std::vector<train::RowScore> scores;
    for (std::size_t i = 0; i < 4; ++i) {
      const Trajectory& trajectory = batch[i / 2].trajectories[i % 2];
      std::vector<double> row(experience.tokens()[i].size(), std::nan(""));
      const std::size_t prompt = row.size() - trajectory.tokens.size();
      for (std::size_t t = 0; t < trajectory.tokens.size(); ++t)
        row[prompt + t] = trajectory.logprobs[t] + std::log(rhos[i][t]);
      scores.push_back({.logprobs = row, .entropies = {}, .outputs = {}});
    }
    experience.set_anchor(scores);
    experience.correct(options);
    return experience;
  };
  objective::PolicyOptions options;
  options.importance = objective::ImportanceWeight::kToken;
  options.importance_cap = 2;
  // Observations are not among the fifteen tokens that were drawn.
  EXPECT_NEAR(corrected(options).mean_weight(),
              (0.5 + 2 + 1 + 1 + 1 + 0.25 + 2 + 1 + 1 + 2 + 5) / 15, 1e-12);
  options.importance = objective::ImportanceWeight::kSequence;
  EXPECT_NEAR(corrected(options).mean_weight(), (2 + 0.75 + 2 + 1) / 4, 1e-12);

  options.rejection = objective::Rejection::kToken;
  options.rejection_low = 0.4, options.rejection_high = 3.5;
  const Experience by_token = corrected(options);
  EXPECT_EQ(by_token.dropped_tokens(0), 2);
  EXPECT_EQ(by_token.dropped_tokens(1), 1);
  EXPECT_EQ(by_token.step(0, 0, 1, 0).loss_rows, 9 - 2);
  EXPECT_EQ(by_token.step(0, 0, 1, 0).sequences, 2);
  // The completion of one token is left without any.
  EXPECT_EQ(by_token.step(0, 0, 1, 1).loss_rows, 5);
  EXPECT_EQ(by_token.step(0, 0, 1, 1).sequences, 1);
  const data::Step step = by_token.step(0, 0, 1, 0);
  for (const data::Batch& micro : step.micro_batches) {
    for (std::size_t s = 0; s < micro.row_ids.size(); ++s) {
      const auto row = static_cast<std::size_t>(micro.row_ids[s]);
      const std::int64_t begin = micro.cu_seqlens_host[s] + std::ssize(all.row(0).tokens) - 1;
      for (std::size_t t = 0; t < rhos[row].size(); ++t) {
        const bool is_in =
            rhos[row][t] != 4 && rhos[row][t] != 0.25 && batch[0].trajectories[row].is_sampled(t);
        const std::int64_t place = begin + static_cast<std::int64_t>(t);
        EXPECT_EQ(micro.loss_weights[place].item<float>(), is_in ? 1 : 0) << row << " " << t;
        EXPECT_EQ(micro.labels[place].item<std::int64_t>() != data::kIgnoredLabel, is_in);
      }
    }
  }
  options.rejection = objective::Rejection::kSequence;
  const Experience by_sequence = corrected(options);
  EXPECT_EQ(by_sequence.dropped_tokens(0) + by_sequence.dropped_tokens(1), 1);
  // Advantages are those of all.
  EXPECT_EQ(by_token.policy_rows(0)[0].advantages, by_sequence.policy_rows(0)[0].advantages);
}

TEST_F(ExperienceTest, KlInTheRewardLowersIt) {
  const config::RunConfig run =
      config({"rl.reference.kl_coef=0.5", "rl.reference.kl_where=reward",
              "rl.algorithm.advantage=reinforce++", "rl.algorithm.gamma=1"});
  const Prompts all = prompts(run);
  const std::vector<Group> batch = groups();
  Experience with(run, all, batch);
  std::vector<train::RowScore> scores;
  for (const auto& tokens : with.tokens())
    scores.push_back(
        {.logprobs = std::vector<double>(tokens.size(), -0.1), .entropies = {}, .outputs = {}});
  with.set_reference(scores);
  // log pi - log reference is 0 at a completion's first token and falls: later tokens gain.
  const std::vector<objective::PolicyRow> rows = with.policy_rows(0);
  const std::size_t first = all.row(0).tokens.size() - 1;
  EXPECT_GT(rows[0].advantages[first], rows[0].advantages[first + 2]);
  // The loss has none of it, and measures it.
  EXPECT_EQ(policy_options(run).kl_coefficient, 0);
  EXPECT_FALSE(rows[0].reference.empty());
}

TEST_F(ExperienceTest, GaeComparesTokensWithTheCriticsValues) {
  const config::RunConfig run = config({"rl.algorithm.advantage=gae", "rl.algorithm.gamma=0.9",
                                        "rl.algorithm.lambda=0.8", "rl.overlong=mask"});
  const Prompts all = prompts(run);
  std::vector<Group> batch = groups();
  // The second token of the last completion was told, not drawn.
  batch[1].trajectories[1].sampled = {1, 0, 1, 1, 1};
  Experience experience(run, all, batch);
  std::vector<std::vector<double>> values;
  for (const auto& tokens : experience.tokens()) {
    std::vector<double>& row = values.emplace_back();
    for (std::size_t t = 0; t < tokens.size(); ++t) row.push_back(0.1 * static_cast<double>(t));
  }
  experience.set_values(values);
  const std::vector<objective::PolicyRow> policy = experience.policy_rows(0);
  const std::vector<objective::ValueRow> critic = experience.value_rows();
  std::vector<double> expected, found;
  double mean_return = 0, mean_error = 0;
  std::vector<double> returns, errors;
  for (std::size_t i = 0; i < 4; ++i) {
    const Trajectory& trajectory = batch[i / 2].trajectories[i % 2];
    const std::size_t first = all.row(batch[i / 2].row).tokens.size() - 1;
    double next_value = 0, next = 0;
    for (std::size_t t = trajectory.tokens.size(); t-- > 0;) {
      if (!trajectory.is_sampled(t)) continue;
      const double reward = t + 1 == trajectory.tokens.size() ? trajectory.reward : 0,
                   value = values[i][first + t];
      next = reward + 0.9 * next_value - value + 0.9 * 0.8 * next;
      next_value = value;
      EXPECT_NEAR(critic[i].returns[first + t], next + value, 1e-12) << i << " " << t;
      // The truncated completion is in no loss.
      if (i == 1) continue;
      expected.push_back(next);
      found.push_back(policy[i].advantages[first + t]);
      returns.push_back(next + value);
      errors.push_back(next);
    }
    EXPECT_EQ(critic[i].old, values[i]);
  }
  objective::whiten(expected, std::vector<double>(expected.size(), 1));
  for (std::size_t k = 0; k < expected.size(); ++k) EXPECT_NEAR(found[k], expected[k], 1e-9) << k;
  const auto n = static_cast<double>(returns.size());
  double variance = 0, left = 0;
  for (std::size_t k = 0; k < returns.size(); ++k)
    mean_return += returns[k] / n, mean_error += errors[k] / n;
  for (std::size_t k = 0; k < returns.size(); ++k) {
    variance += (returns[k] - mean_return) * (returns[k] - mean_return);
    left += (errors[k] - mean_error) * (errors[k] - mean_error);
  }
  EXPECT_NEAR(experience.explained_variance(), 1 - left / variance, 1e-9);
}

TEST_F(ExperienceTest, RoundingOfEqualReturnsHasNoVariance) {
  const config::RunConfig run = config({"rl.algorithm.advantage=gae", "rl.algorithm.lambda=1"});
  const Prompts all = prompts(run);
  std::vector<Group> batch = groups();
  for (Group& group : batch) {
    for (Trajectory& trajectory : group.trajectories) trajectory.reward = 0;
  }
  Experience experience(run, all, batch);
  std::vector<std::vector<double>> values;
  for (const auto& tokens : experience.tokens()) {
    std::vector<double>& row = values.emplace_back();
    for (std::size_t t = 0; t < tokens.size(); ++t)
      row.push_back(t % 2 == 0 ? 0.7 : 1e-5 / static_cast<double>(t + 2));
  }
  experience.set_values(values);
  double most = 0;
  for (const objective::ValueRow& row : experience.value_rows()) {
    for (const double value : row.returns) most = std::max(most, std::abs(value));
  }
  ASSERT_GT(most, 0);
  EXPECT_EQ(experience.explained_variance(), 0);
}

TEST_F(ExperienceTest, PromptsNameTheRowThatIsWrong) {
  std::ofstream(dir_ / "prompts.jsonl", std::ios::app) << R"({"question": "why?"})"
                                                       << "\n";
  try {
    prompts(config());
    FAIL() << "a row without a prompt was read";
  } catch (const DataError& error) {
    EXPECT_NE(std::string(error.what()).find("prompts.jsonl:7: the row has neither 'prompt' nor"),
              std::string::npos)
        << error.what();
  }
}

TEST_F(ExperienceTest, EachEpochHasItsOrder) {
  const config::RunConfig run = config({"data.shuffle=true"});
  const Prompts all = prompts(run);
  std::vector<std::int64_t> first, second;
  for (std::int64_t c = 0; c < 6; ++c) first.push_back(all.index_of(c));
  for (std::int64_t c = 6; c < 12; ++c) second.push_back(all.index_of(c));
  EXPECT_NE(first, second);
  EXPECT_EQ(all.index_of(2), first[2]);
  std::ranges::sort(first), std::ranges::sort(second);
  EXPECT_EQ(first, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(second, first);
}

}  // namespace
}  // namespace heddle::rl
