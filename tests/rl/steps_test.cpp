// Whole runs of `heddle rl` with a tiny model of random weights.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <set>

#include "base/errors.h"
#include "base/hash.h"
#include "base/text.h"
#include "rl/rl_fixture.h"

namespace heddle {
namespace {

TEST_F(RlTest, RewardClimbsAndNotWithShuffledRewards) {
  const Words settings = {"train.max_steps=60", "optim.lr=1e-2", "rl.groups_per_step=8"};
  const Reports climbs = train(run("climbs", settings));
  const double before = climbs.mean("reward_mean", 0, 3), after = climbs.mean("reward_mean", 55, 5);
  EXPECT_LT(before, 0.6);
  EXPECT_GT(after, before + 0.4);

  Words shuffled = settings;
  shuffled.push_back("rl.reward.shuffle=true");
  const Reports control = train(run("control", shuffled));
  EXPECT_LT(control.mean("reward_mean", 55, 5), control.mean("reward_mean", 0, 3) + 0.3);
}

TEST_F(RlTest, FirstStepIsOnPolicy) {
  const Reports reports = train(run("policy", {"model.dtype=float64", "train.max_steps=2"}));
  const auto& first = reports.steps.front().metrics;
  // The engine's log-probabilities are those of the trainer.
  EXPECT_NEAR(first.at("ratio_mean"), 1, 1e-7);
  EXPECT_NEAR(first.at("kl"), 0, 1e-7);
  EXPECT_GT(first.at("entropy"), 1);
  EXPECT_EQ(first.at("staleness_max"), 0);
  const Reports recomputed =
      train(run("recomputed", {"rl.old_logprobs=recompute", "train.max_steps=1"}));
  EXPECT_EQ(recomputed.steps.front().metrics.at("ratio_mean"), 1);
  EXPECT_EQ(recomputed.steps.front().metrics.at("kl"), 0);
}

TEST_F(RlTest, TurnsOfAnEpisodeAreTrainedAsTheyWereDrawn) {
  const config::RunConfig episodes =
      this->episodes("episodes", {"train.max_steps=2", "rl.groups_every=1",
                                  "rl.reference.kl_coef=0.1", "rollout.stop=[e, a]"});
  const Reports reports = train(episodes);
  const auto& first = reports.steps.front().metrics;
  // Log-probabilities of later turns are those of the tokens before them, observations included.
  EXPECT_NEAR(first.at("ratio_mean"), 1, 1e-7);
  EXPECT_NEAR(first.at("mismatch_abs_max"), 0, 1e-6);
  EXPECT_NEAR(first.at("kl_ref"), 0, 1e-7);
  std::ifstream log(dir_ / "episodes" / "groups.jsonl");
  std::string line;
  ASSERT_TRUE(std::getline(log, line));
  std::set<std::size_t> past;
  const nlohmann::json group = nlohmann::json::parse(line);
  for (const auto& sample : group.at("samples")) {
    const auto turns = sample.value("turns", nlohmann::json::array());
    past.insert(turns.size());
    for (const auto& turn : turns) EXPECT_EQ(turn.at("observation"), " again:");
    // An episode without room for its last turn has the rewards of its turns.
    const double last = turns.size() == 2 ? 1 : 0.25;
    EXPECT_EQ(sample.at("reward"), 0.25 * static_cast<double>(turns.size()) + last);
    EXPECT_TRUE(turns.size() == 2 || sample.at("finish_reason") == "length");
  }
  EXPECT_TRUE(past.contains(2));
}

TEST_F(RlTest, TasksAnswerTurnsThemselves) {
  std::ofstream rows(dir_ / "prompts.jsonl");
  for (int i = 0; i < 8; ++i)
    rows << nlohmann::json{{"prompt", "guess " + std::to_string(i)}, {"answer", 5}} << "\n";
  rows.close();
  const Reports reports = train(episodes(
      "guesses", {"data.train=" + (dir_ / "prompts.jsonl").string(), "rl.reward.command=[]",
                  "rl.reward.verifiers.guess_number=1", "rl.groups_every=1", "train.max_steps=2",
                  "rl.reward.parameters.guess_number='{\"turns\": 3}'", "rollout.stop=[e, a]",
                  "data.max_length=96", "rollout.max_new_tokens=64"}));
  EXPECT_NEAR(reports.steps.front().metrics.at("ratio_mean"), 1, 1e-7);
  std::ifstream log(dir_ / "guesses" / "groups.jsonl");
  std::size_t most = 0;
  for (std::string line; std::getline(log, line);) {
    const auto row = nlohmann::json::parse(line);
    for (const auto& sample : row.at("samples")) {
      const auto turns = sample.value("turns", nlohmann::json::array());
      most = std::max(most, turns.size());
      for (const auto& turn : turns)
        EXPECT_THAT(turn.at("observation"),
                    ::testing::AnyOf("\nnot a number\n", "\nhigher\n", "\nlower\n"));
    }
  }
  EXPECT_EQ(most, 2u);
}

TEST_F(RlTest, EvaluationGoesOnWithTheTurnsOfAnEpisode) {
  // Where nothing is learnt and the likeliest token is always drawn, the training steps of an epoch
  // are the evaluation. Every token ends a turn.
  std::vector<std::int32_t> ends(4096);
  std::iota(ends.begin(), ends.end(), 0);
  files::write_atomically(dir_ / "model" / "generation_config.json",
                          nlohmann::json{{"eos_token_id", ends}}.dump());
  const Reports reports = train(
      episodes("held-out", {"data.eval=" + (dir_ / "episodes.jsonl").string(), "train.max_steps=3",
                            "train.eval_every=3", "optim.lr=0", "rollout.temperature=1e-6"}));
  ASSERT_EQ(reports.steps.size(), 3U);
  const auto& evaluation = reports.evaluations.back();
  EXPECT_DOUBLE_EQ(evaluation.metrics.at("reward"), reports.mean("reward_mean", 0, 3));
  EXPECT_DOUBLE_EQ(evaluation.metrics.at("length"), reports.mean("length_mean", 0, 3));
  EXPECT_DOUBLE_EQ(evaluation.loss, -evaluation.metrics.at("reward"));
  // All three turns, of one token each.
  EXPECT_DOUBLE_EQ(evaluation.metrics.at("reward"), 0.25 + 0.25 + 1);
  EXPECT_DOUBLE_EQ(evaluation.metrics.at("length"), 3);
}

TEST_F(RlTest, PolicyIsTrainedAtTheTemperatureThatDrewItsTokens) {
  const auto first = [&](const char* temperature) {
    return train(run(std::string("at-") + temperature,
                     {"model.dtype=float64", "train.max_steps=1", "rl.reference.kl_coef=0.1",
                      std::string("rollout.temperature=") + temperature}))
        .steps.front()
        .metrics;
  };
  const auto cold = first("0.5"), usual = first("1");
  EXPECT_NEAR(cold.at("ratio_mean"), 1, 1e-7);
  EXPECT_NEAR(cold.at("mismatch_abs_max"), 0, 1e-6);
  EXPECT_NEAR(cold.at("kl_ref"), 0, 1e-7);
  // Twice the logits of an almost even distribution: four times as far from the even one's entropy.
  const double even = std::log(4096);
  EXPECT_NEAR((even - cold.at("entropy")) / (even - usual.at("entropy")), 4, 0.5);
}

TEST_F(RlTest, PolicyIsTrainedOverTheTokensThatCutsLeave) {
  const auto first = [&](const std::string& name, Words cuts) {
    Words settings = {"model.dtype=float64", "train.max_steps=2", "optim.lr=1e-2"};
    settings.insert(settings.end(), cuts.begin(), cuts.end());
    return train(run(name, settings)).steps.front();
  };
  const auto all = first("uncut", {});
  for (const Words& cuts :
       {Words{"rollout.top_k=20"}, Words{"rollout.top_k=64", "rollout.top_p=0.3"},
        Words{"rollout.top_k=64", "rollout.min_p=0.97", "rollout.temperature=0.8"}}) {
    const train::StepInfo step = first("cut-" + cuts.back(), cuts);
    // The distribution that drew the tokens is trained, up to the sampler's 2e-6.
    EXPECT_NEAR(step.metrics.at("ratio_mean"), 1, 1e-5) << cuts.back();
    EXPECT_LT(step.metrics.at("mismatch_abs_max"), 1e-5) << cuts.back();
    EXPECT_LT(step.metrics.at("entropy"), std::log(64) + 1e-9) << cuts.back();
    EXPECT_GE(step.metrics.at("entropy"), 0) << cuts.back();  // 0: one token was left
  }
  EXPECT_GT(all.metrics.at("entropy"), std::log(64));
}

TEST_F(RlTest, CutsNeedABound) {
  const std::string message = testing::message_of([&] { run("cuts", {"rollout.top_p=0.9"}); });
  EXPECT_NE(message.find("rollout.top_k"), std::string::npos);
}

TEST_F(RlTest, ReferenceIsTakenOverTheTokensThatCutsLeave) {
  for (const Words& kind : {Words{"train.method=full"}, Words{"train.method=lora"}}) {
    Words settings = {"model.dtype=float64", "train.max_steps=3", "optim.lr=1e-2",
                      "rollout.top_k=64",    "rollout.top_p=0.3", "rl.reference.kl_coef=0.1"};
    settings.insert(settings.end(), kind.begin(), kind.end());
    const std::vector<train::StepInfo> steps = train(run("reference-" + kind[0], settings)).steps;
    // The policy begins as its reference. Over all tokens the reference would be far from it: the
    // cuts leave less than a third of the probability.
    EXPECT_NEAR(steps[0].metrics.at("kl_ref"), 0, 1e-9) << kind[0];
    EXPECT_GT(steps[2].metrics.at("kl_ref"), 1e-6) << kind[0];
    EXPECT_LT(steps[2].metrics.at("kl_ref"), 0.5) << kind[0];
  }
}

TEST_F(RlTest, PinnedSequencesEndUnderTheAdapterThatTheyBeganWith) {
  // The most versions that one completion has tokens of.
  const auto most_versions = [&](const std::string& mode) {
    const Reports reports = train(
        run(mode, {"train.method=lora", "adapter.rank=4", "rl.mode=async", "rl.max_staleness=2",
                   "optim.lr=1e-2", "train.max_steps=8", "model.dtype=float64", "rl.groups_every=1",
                   // Prompts are read in parts, so that completions do not end all at once.
                   "rollout.max_sequences=7", "rollout.prefill_tokens=8",
                   "rollout.max_new_tokens=12", "rl.update_mode=" + mode}));
    double largest = 0;
    for (const train::StepInfo& step : reports.steps)
      largest = std::max(largest, step.metrics.at("staleness_max"));
    EXPECT_EQ(reports.steps.size(), 8u) << mode;
    EXPECT_GT(largest, 0) << mode;
    EXPECT_LE(largest, 2) << mode;
    std::size_t most = 0;
    std::ifstream groups(dir_ / mode / "groups.jsonl");
    for (std::string line; std::getline(groups, line);) {
      const auto group = nlohmann::json::parse(line);
      for (const auto& sample : group.at("samples"))
        most = std::max(most, sample.at("versions").size());
    }
    return most;
  };
  EXPECT_EQ(most_versions("pin"), 1u);
  EXPECT_GT(most_versions("recompute"), 1u);
  EXPECT_NE(
      testing::message_of([&] { run("full", {"rl.update_mode=pin"}); }).find("train.method lora"),
      std::string::npos);
}

TEST_F(RlTest, LedgerKnowsTheWeightsAndTheCheckpointMustHaveThem) {
  train(run("whole"));
  train(run("parts"), 3);
  const auto ledger = [&](const char* name) { return dir_ / name / "ledger.log"; };
  const auto hash_of = [&](const char* name, std::int64_t version) {
    const std::string text = files::read(ledger(name));
    const std::string start = fmt::format("{{\"version\":{},\"hash\":\"", version);
    const auto at = text.find(start);
    return at == std::string::npos ? "" : text.substr(at + start.size(), 33);
  };
  EXPECT_EQ(hash_of("parts", 3), hash_of("whole", 3));
  EXPECT_NE(hash_of("whole", 3), hash_of("whole", 2));
  EXPECT_EQ(hash_of("whole", 3).find_first_not_of("0123456789abcdef/"), std::string::npos);
  // As if other weights had been published: the record's last digit is another one.
  std::string text = files::read(ledger("parts")), forged;
  const std::string old = hash_of("parts", 3);
  for (const std::string& line : text::split(text, '\n')) {
    if (line.empty()) continue;
    std::string record = line.substr(17);
    if (const auto at = record.find(old); at != std::string::npos) {
      record[at + 32] = record[at + 32] == '0' ? '1' : '0';
    }
    forged += fmt::format("{:016x} {}\n", hash::of(record, forged.size()), record);
  }
  ASSERT_EQ(forged.size(), text.size());
  files::write_atomically(ledger("parts"), forged);
  EXPECT_NE(testing::message_of([&] { train(run("parts")); }).find("were published as version 3"),
            std::string::npos);
  files::write_atomically(ledger("parts"), text);
  train(run("parts"));
  EXPECT_EQ(weights("whole"), weights("parts"));
}

TEST_F(RlTest, StoppedRunContinuesBitForBit) {
  train(run("whole"));
  train(run("parts"), 3);
  EXPECT_EQ(train(run("parts")).steps.size(), 2u);
  EXPECT_EQ(weights("whole"), weights("parts"));
}

/// Numbers of a metric over the steps; -1 where a step has none.
std::vector<double> column(const Reports& reports, const char* name) {
  std::vector<double> values;
  for (const train::StepInfo& step : reports.steps) {
    const double* value = step.metrics.find(name);
    values.push_back(value != nullptr ? *value : -1);
  }
  return values;
}

TEST_F(RlTest, ABatchIsTrainedOnBySeveralStepsBeforeItsWeightsArePublished) {
  const Reports reports =
      train(run("several", {"rl.sync_every=3", "rl.epochs=2", "optim.lr=1e-2",
                            "model.dtype=float64", "train.max_steps=12", "rl.groups_every=1"}));
  ASSERT_EQ(reports.steps.size(), 12u);
  EXPECT_EQ(column(reports, "version"), (std::vector<double>{0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1}));
  for (std::size_t i = 0; i < 12; ++i) {
    // The second pass has the rows of the first.
    const train::StepInfo &step = reports.steps[i], &first = reports.steps[i - (i % 6) / 3 * 3];
    EXPECT_EQ(step.metrics.at("reward_mean"), first.metrics.at("reward_mean")) << i;
    EXPECT_EQ(step.loss_tokens, first.loss_tokens) << i;
    // Tokens are drawn once, by the weights before the first step.
    EXPECT_EQ(step.metrics.find("gen_tokens") != nullptr, i % 6 == 0) << i;
    const double off = step.metrics.at("mismatch_abs_max");
    if (i % 6 == 0) {
      EXPECT_LT(off, 1e-6) << i;
    } else {
      EXPECT_GT(off, 1e-4) << i;
    }
  }
  std::vector<std::string> prompts;  // of the first group of each step
  std::ifstream groups(dir_ / "several" / "groups.jsonl");
  for (std::string line; std::getline(groups, line);)
    prompts.push_back(nlohmann::json::parse(line).at("prompt").dump());
  ASSERT_EQ(prompts.size(), 12u);
  EXPECT_EQ(std::set<std::string>(prompts.begin(), prompts.end()).size(), 6u);
  for (std::size_t i = 0; i < 12; ++i) EXPECT_EQ(prompts[i], prompts[i - (i % 6) / 3 * 3]) << i;
  // Each prompt is dispatched and consumed once.
  const rl::LedgerState state = rl::Ledger(dir_ / "several" / "ledger.log").state();
  EXPECT_EQ(state.consumed, 24);
  EXPECT_TRUE(state.pending.empty());
  EXPECT_EQ(state.version, 2);
}

TEST_F(RlTest, StepsOfABatchShareItsAdvantages) {
  // Whitened over the batch, which both runs generate alike: their sums over it are those of one.
  const auto tokens = [&](const std::string& name, const Words& words) {
    Words all = {"optim.lr=0", "train.max_steps=2", "model.dtype=float64",
                 "rl.algorithm.advantage=reinforce++", "rl.algorithm.mean=token_sum"};
    all.insert(all.end(), words.begin(), words.end());
    const Reports reports = train(run(name, all));
    double loss = 0;
    for (const train::StepInfo& step : reports.steps) loss += step.loss;
    return loss;
  };
  const double parts = tokens("parts", {"rl.sync_every=2"});
  const double whole = tokens("one", {"rl.groups_per_step=8", "train.max_steps=1"});
  EXPECT_NEAR(parts, whole, 1e-9);
}

TEST_F(RlTest, TheAnchorStaysOverTheStepsOfABatch) {
  for (const char* anchor : {"rollout", "recompute"}) {
    const Reports reports = train(
        run(std::string("anchor-") + anchor,
            {"rl.epochs=3", "optim.lr=1e-2", "model.dtype=float64", "train.max_steps=6",
             "rl.mode=async", "rl.max_staleness=1", std::string("rl.old_logprobs=") + anchor}));
    const bool recomputes = std::string(anchor) == "recompute";
    for (std::size_t i = 0; i < reports.steps.size(); ++i) {
      const train::StepInfo& step = reports.steps[i];
      EXPECT_EQ(step.metrics.find("old_logprobs_s") != nullptr, recomputes);
      const double ratio = std::abs(step.metrics.at("ratio_max") - 1);
      if (i % 3 > 0) {
        EXPECT_GT(ratio, 1e-4) << anchor << i;
      } else if (recomputes) {
        // The weights before the first step are the anchor, however old the tokens are.
        EXPECT_LT(ratio, 1e-6) << anchor << i;
      }
    }
  }
}

TEST_F(RlTest, AnAnchorOfItsOwnIsOverTheTokensThatCutsLeave) {
  const auto steps = [&](const std::string& name, Words more) {
    more.insert(more.end(), {"model.dtype=float64", "optim.lr=1e-2", "rl.old_logprobs=recompute",
                             "rollout.top_k=64", "rollout.top_p=0.3", "train.max_steps=4"});
    return train(run(name, more)).steps;
  };
  // One pass finds what the step's own forward finds.
  const Words stale = {"rl.mode=async", "rl.max_staleness=3", "rollout.max_sequences=64"};
  Words normalized = stale;
  normalized.insert(normalized.end(), {"rl.correction.rs=token", "rl.correction.rs_bounds=[0, 100]",
                                       "rl.correction.rs_denominator=drop"});
  const auto own = steps("own", stale), passed = steps("passed", normalized);
  for (std::size_t i = 0; i < own.size(); ++i) {
    EXPECT_EQ(own[i].metrics.find("old_logprobs_s"), nullptr) << i;
    EXPECT_NE(passed[i].metrics.find("old_logprobs_s"), nullptr) << i;
    EXPECT_NEAR(passed[i].loss, own[i].loss, 1e-9) << i;
    EXPECT_NEAR(passed[i].grad_norm, own[i].grad_norm, 1e-7 * own[i].grad_norm) << i;
    EXPECT_NEAR(passed[i].metrics.at("mismatch_k3"), own[i].metrics.at("mismatch_k3"), 1e-9) << i;
  }
  EXPECT_GT(own.back().metrics.at("mismatch_k3"), 1e-9);
  // The first of several steps is at its anchor.
  const auto twice = steps("twice", {"rl.epochs=2"});
  for (std::size_t i = 0; i < twice.size(); ++i) {
    const double off = std::abs(twice[i].metrics.at("ratio_max") - 1);
    if (i % 2 == 0) {
      EXPECT_LT(off, 1e-9) << i;
    } else {
      EXPECT_GT(off, 1e-4) << i;
    }
  }
}

TEST_F(RlTest, AnInterpolatedAnchorFollowsTokensThatAreOlderThanAVersion) {
  const auto steps = [&](const char* anchor) {
    return train(run(std::string("old-") + anchor,
                     {"rl.mode=async", "rl.max_staleness=3", "rollout.max_sequences=64",
                      "optim.lr=1e-2", "model.dtype=float64", "train.max_steps=6",
                      std::string("rl.old_logprobs=") + anchor}))
        .steps;
  };
  const auto between = steps("loglinear"), rollout = steps("rollout");
  ASSERT_EQ(between.size(), 6u);
  // The runs are one until a token is older than a version.
  std::size_t i = 0;
  for (; i < 6 && between[i].metrics.find("mismatch_k3_age_2") == nullptr; ++i)
    EXPECT_NEAR(between[i].loss, rollout[i].loss, 1e-12) << i;
  ASSERT_LT(i, 6u);
  EXPECT_GT(i, 0u);
  const auto &one = between[i].metrics, &other = rollout[i].metrics;
  EXPECT_NEAR(one.at("mismatch_k1"), other.at("mismatch_k1"), 1e-12);
  // All its tokens are of two versions before: the anchor lies half-way.
  EXPECT_EQ(one.at("staleness_mean"), 2);
  EXPECT_GT(std::abs(other.at("kl")), 1e-6);
  EXPECT_NEAR(one.at("kl"), other.at("kl") / 2, 1e-12);
  EXPECT_LT(one.at("mismatch_ess"), 1);
  EXPECT_NE(weights("old-loglinear"), weights("old-rollout"));
  EXPECT_NE(testing::message_of([&] {
              run("sync", {"rl.old_logprobs=loglinear"});
            }).find("rl.old_logprobs"),
            std::string::npos);
}

TEST_F(RlTest, ARunStopsAndContinuesBetweenBatches) {
  const Words settings = {"rl.sync_every=2", "rl.epochs=2", "optim.lr=1e-2", "train.max_steps=12",
                          "ckpt.every=3"};
  train(run("whole", settings));
  // Asked to after its fifth step, it ends the batch.
  EXPECT_EQ(train(run("parts", settings), 5).steps.size(), 8u);
  EXPECT_FALSE(fs::exists(dir_ / "parts" / "checkpoints" / "step-3"));
  EXPECT_EQ(train(run("parts", settings)).steps.size(), 4u);
  EXPECT_EQ(weights("whole"), weights("parts"));
}

TEST_F(RlTest, WhatTheLastStepLeavesOfABatchIsGeneratedWhenTheRunGoesOn) {
  const Words settings = {"rl.sync_every=3"};
  const auto limited = [&](const char* steps) {
    Words all = settings;
    all.push_back(std::string("train.max_steps=") + steps);
    return run("longer", all);
  };
  EXPECT_EQ(train(limited("2")).steps.size(), 2u);
  rl::LedgerState state = rl::Ledger(dir_ / "longer" / "ledger.log").state();
  EXPECT_EQ(state.consumed, 8);
  EXPECT_EQ(state.pending.size(), 4u);
  EXPECT_EQ(train(limited("5")).steps.size(), 3u);
  state = rl::Ledger(dir_ / "longer" / "ledger.log").state();
  EXPECT_EQ(state.consumed, 20);
  EXPECT_EQ(state.next_cursor, 20);
  EXPECT_TRUE(state.pending.empty());
}

TEST_F(RlTest, AnEntropyBonusKeepsThePolicyWide) {
  const auto entropies = [&](const char* coefficient) {
    const Reports reports =
        train(run(std::string("entropy-") + coefficient,
                  {"train.max_steps=30", "optim.lr=1e-2", "rl.groups_per_step=8",
                   std::string("rl.algorithm.entropy_coef=") + coefficient}));
    return std::pair(reports.mean("entropy", 0, 1), reports.mean("entropy", 25, 5));
  };
  const auto [first, narrow] = entropies("0");
  const auto [same, wide] = entropies("0.3");
  EXPECT_EQ(first, same);
  EXPECT_LT(narrow, first - 0.1);
  EXPECT_GT(wide, narrow + 0.1);
}

TEST_F(RlTest, MicroBatchesChangeNothing) {
  expect_no_change_by_micro_batches({"model.dtype=float64", "train.max_steps=3",
                                     "rl.algorithm.mean=seq_mean_token_mean",
                                     "rl.algorithm.loss=gspo"});
}

TEST_F(RlTest, ReferenceIsTheModelThatTheRunStartsFrom) {
  for (const char* method : {"full", "lora"}) {
    const Reports reports =
        train(run(std::string("reference-") + method,
                  {std::string("train.method=") + method, "adapter.rank=4", "model.dtype=float64",
                   "optim.lr=1e-2", "rl.reference.kl_coef=0.1", "train.max_steps=4"}));
    EXPECT_NEAR(reports.steps.front().metrics.at("kl_ref"), 0, 1e-9) << method;
    EXPECT_GT(reports.steps.back().metrics.at("kl_ref"), 1e-4) << method;
  }
}

TEST_F(RlTest, AStepOfMaskedCompletionsLeavesThePolicyAsItIs) {
  // Nothing ends within one token.
  const Words settings = {"rollout.max_new_tokens=1", "train.max_steps=3",
                          "optim.weight_decay=0.1"};
  for (const char* advantage : {"grpo", "gae"}) {
    Words masked = settings, still = settings;
    for (Words* words : {&masked, &still})
      words->push_back(std::string("rl.algorithm.advantage=") + advantage);
    masked.push_back("rl.overlong=mask");
    still.push_back("optim.lr=0");
    const std::string name = std::string("masked-") + advantage;
    const Reports reports = train(run(name, masked));
    train(run(name + "-still", still));
    ASSERT_EQ(reports.steps.size(), 3u) << advantage;
    for (const train::StepInfo& step : reports.steps) {
      EXPECT_EQ(step.metrics.at("truncated"), 1);
      EXPECT_EQ(step.loss_tokens, 0);
      EXPECT_EQ(step.loss, 0);
      EXPECT_EQ(step.lr, 0);
    }
    EXPECT_EQ(weights(name), weights(name + "-still")) << advantage;
  }
}

TEST_F(RlTest, UniformGroupsAreReplaced) {
  const Reports reports = train(run("dynamic", {"rl.dynamic_sampling=true", "train.max_steps=2"}));
  for (const train::StepInfo& step : reports.steps) {
    const double uniform =
        step.metrics.at("groups_all_right") + step.metrics.at("groups_all_wrong");
    EXPECT_GT(step.metrics.at("rejected_filtered"), 0);
    EXPECT_GT(step.metrics.at("rejected_filtered_tokens"), 0);
    EXPECT_LE(step.metrics.at("rejected_filtered_tokens"), 24);
    // After max_attempts a batch takes what there is.
    EXPECT_LE(step.metrics.at("rejected_filtered"), uniform);
    EXPECT_GT(step.metrics.at("reward_std"), 0);
  }
}

TEST_F(RlTest, HeldOutPromptsAreJudged) {
  const Reports reports =
      train(run("eval", {"data.eval=" + (dir_ / "prompts.jsonl").string(), "train.max_steps=2"}));
  ASSERT_EQ(reports.evaluations.size(), 1u);
  EXPECT_EQ(reports.evaluations[0].loss, -reports.evaluations[0].metrics.at("reward"));
  EXPECT_TRUE(fs::exists(dir_ / "eval" / "groups.jsonl"));
}

}  // namespace
}  // namespace heddle
