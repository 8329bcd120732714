// `heddle rl` with ranks that only generate.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "ckpt/checkpoint_format.h"
#include "ckpt/training_checkpoint.h"
#include "dist/reinforcement_run.h"
#include "testing/paths.h"

namespace heddle {
namespace {

TEST_F(ReinforcementTest, OtherRanksGenerateWhatTheTrainerWould) {
  ASSERT_EQ(train("one", 0, {}), 0) << runs_.printed("one");
  ASSERT_EQ(train("apart", 2, {"rl.rollout_ranks=1"}), 0) << runs_.printed("apart");
  ASSERT_EQ(train("lora", 2, {"rl.rollout_ranks=1", "train.method=lora", "optim.lr=1e-2"}), 0)
      << runs_.printed("lora");
  EXPECT_EQ(weights("one"), weights("apart"));
  const auto together = metrics("one"), apart = metrics("apart");
  ASSERT_EQ(together.size(), apart.size());
  for (std::size_t i = 0; i < apart.size(); ++i) {
    EXPECT_EQ(together[i].at("loss"), apart[i].at("loss")) << i;
    EXPECT_EQ(together[i].at("reward_mean"), apart[i].at("reward_mean")) << i;
    EXPECT_EQ(apart[i].at("staleness_max"), 0) << i;
    EXPECT_GT(apart[i].at("sync_wire_s"), 0) << i;
    EXPECT_GE(apart[i].at("sync_s"), apart[i].at("sync_wire_s")) << i;
    EXPECT_GT(apart[i].at("sync_pause_s"), 0) << i;
    EXPECT_NEAR(
        apart[i].at("sync_bytes_per_s").get<double>() * apart[i].at("sync_wire_s").get<double>(),
        apart[i].at("sync_bytes").get<double>(), 1e-3)
        << i;
    EXPECT_EQ(apart[i].contains("rendezvous_s"), i == 0) << i;
    // Whoever generates has one engine of the same counts.
    for (const char* count : {"gen_batch", "gen_prefill_saved", "gen_tokens", "ledger_consumed"})
      EXPECT_EQ(together[i].at(count), apart[i].at(count)) << i << count;
    for (const char* of_others : {"sync_wire_s", "sync_pause_s", "rendezvous_s"})
      EXPECT_FALSE(together[i].contains(of_others)) << i << of_others;
  }
  for (const char* run : {"one", "apart", "lora"}) expect_ledger(run, 5);
  // The trainer's log-probabilities of the rollouts' tokens are the rollouts' own.
  for (const auto& row : metrics("lora")) EXPECT_NEAR(row.at("mismatch_abs_max"), 0, 1e-4);
}

TEST_F(ReinforcementTest, DeterministicRunsHaveTheBitsOfOneAnother) {
  // Runs apart update at other moments than one process does, and no two of them at the same.
  std::set<std::string> all;
  for (const char* seed : {"0", "5"}) {
    const auto run = [&](const std::string& name, int ranks, Words more) {
      const Words settings = {
          std::string("train.seed=") + seed, "optim.lr=1e-2",       "rl.deterministic=true",
          "rl.dynamic_sampling=true",        "rl.update_mode=wait", "rollout.max_sequences=5",
          "rollout.max_new_tokens=12",       "rollout.stop=[e, a]"};
      more.insert(more.begin(), settings.begin(), settings.end());
      const std::string whole = name + seed;
      EXPECT_EQ(train(whole, ranks, more), 0) << runs_.printed(whole);
      EXPECT_EQ(metrics(whole).size(), 5u) << whole;
      return weights(whole);
    };
    const Words none = {"rl.mode=async", "rl.max_staleness=0"};
    const std::string sync = run("sync", 0, {"rl.mode=sync"});
    EXPECT_EQ(run("none", 0, none), sync) << seed;
    EXPECT_EQ(run("none-apart", 2, {none[0], none[1], "rl.rollout_ranks=1"}), sync) << seed;
    const Words stale = {"rl.mode=async", "rl.max_staleness=2", "rl.max_inflight_groups=3"};
    const std::string one = run("stale", 0, stale);
    EXPECT_EQ(run("stale-apart", 2, {stale[0], stale[1], stale[2], "rl.rollout_ranks=1"}), one)
        << seed;
    // Weights that come while the rollouts draw change nothing of what they draw.
    EXPECT_EQ(run("stale-beside", 2,
                  {stale[0], stale[1], stale[2], "rl.rollout_ranks=1", "sync.staged=true",
                   "sync.bucket_bytes=4096"}),
              one)
        << seed;
    EXPECT_TRUE(all.insert(sync).second) << seed;
    EXPECT_TRUE(all.insert(one).second) << seed;
    double largest = 0;
    for (const auto& row : metrics(std::string("stale-apart") + seed)) {
      largest = std::max(largest, row.at("staleness_max").get<double>());
      EXPECT_EQ(row.at("partial_ratio"), 0);
    }
    EXPECT_EQ(largest, 2) << seed;
  }
}

TEST_F(ReinforcementTest, MergedAdaptersDrawWhatThoseBesideTheirLayersDo) {
  const auto run = [&](const std::string& name, int ranks, Words more) {
    const Words lora = {"train.method=lora",        "model.dtype=float64",       "optim.lr=1e-2",
                        "rl.reference.kl_coef=0.1", "rl.reference.sync_every=2", "sync.verify=1"};
    more.insert(more.end(), lora.begin(), lora.end());
    EXPECT_EQ(train(name, ranks, more), 0) << runs_.printed(name);
    return metrics(name);
  };
  const auto beside = run("beside", 0, {});
  const std::vector<std::tuple<std::string, int, Words>> layouts = {
      {"one", 0, {}},
      {"apart", 2, {"rl.rollout_ranks=1"}},
      {"replicas", 2, {"parallel.dp=2"}},
      {"slices", 2, {"parallel.tp=2"}}};
  for (auto [name, ranks, settings] : layouts) {
    settings.push_back("rollout.merge_adapter=true");
    const auto merged = run(name, ranks, settings);
    ASSERT_EQ(merged.size(), beside.size()) << name;
    for (std::size_t i = 0; i < merged.size(); ++i) {
      EXPECT_EQ(merged[i].at("reward_mean"), beside[i].at("reward_mean")) << name << i;
      EXPECT_NEAR(merged[i].at("loss").get<double>(), beside[i].at("loss").get<double>(), 1e-8)
          << name << i;
      EXPECT_NEAR(merged[i].at("mismatch_abs_max").get<double>(), 0, 1e-6) << name << i;
    }
  }
  EXPECT_NE(
      train("divided", 2, {"parallel.fsdp=2", "train.method=lora", "rollout.merge_adapter=true"}),
      0);
  EXPECT_THAT(runs_.printed("divided"), ::testing::HasSubstr("expected parallel.fsdp 1"));
}

TEST_F(ReinforcementTest, RolloutsGetTheWeightsAfterTheLastStepOfABatch) {
  const Words several = {"rl.sync_every=2", "rl.epochs=2", "train.max_steps=8", "optim.lr=1e-2",
                         "model.dtype=float64"};
  const auto run = [&](const std::string& name, int ranks, Words more) {
    more.insert(more.end(), several.begin(), several.end());
    EXPECT_EQ(train(name, ranks, more), 0) << runs_.printed(name);
    const rl::LedgerState state = rl::Ledger(runs_.directory() / name / "ledger.log").state();
    EXPECT_EQ(state.version, 2) << name;
    EXPECT_EQ(state.consumed, 4 * kGroups) << name;
    return metrics(name);
  };
  const auto one = run("one", 0, {}), apart = run("apart", 2, {"rl.rollout_ranks=1"}),
             divided = run("divided", 2, {"parallel.fsdp=2"}),
             by_layer = run("by-layer", 2, {"parallel.fsdp=2", "rollout.gather_weights=false"});
  EXPECT_EQ(weights("one"), weights("apart"));
  ASSERT_EQ(one.size(), 8u);
  ASSERT_EQ(apart.size(), 8u);
  ASSERT_EQ(divided.size(), 8u);
  ASSERT_EQ(by_layer.size(), 8u);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(apart[i].at("version"), i / 4) << i;
    EXPECT_EQ(apart[i].contains("wait_s"), i % 4 == 0) << i;
    for (const auto& run : {divided, by_layer})
      EXPECT_NEAR(run[i].at("loss").get<double>(), one[i].at("loss").get<double>(), 1e-9) << i;
  }
  // The anchor of old tokens is found once, on all ranks of the trainer.
  const auto stale = run("stale", 3,
                         {"rl.trainer_ranks=2", "rl.rollout_ranks=1", "parallel.tp=2",
                          "rl.mode=async", "rl.old_logprobs=recompute"});
  for (std::size_t i = 0; i < stale.size(); ++i)
    EXPECT_EQ(std::abs(stale[i].at("ratio_max").get<double>() - 1) < 1e-6, i % 4 == 0) << i;
}

TEST_F(ReinforcementTest, ProgramsJudgeForAllRanksWhileTheseGenerate) {
  // Rewards are the lengths of completions.
  const auto losses = [&](const std::string& name, int ranks, Words more) {
    Words all = {
        "model.dtype=float64", "train.max_steps=3",
        "rl.reward.command=[" + testing::built_path("tests/reward/heddle_reward_worker") + "]"};
    all.insert(all.end(), more.begin(), more.end());
    EXPECT_EQ(train(name, ranks, all), 0) << runs_.printed(name);
    std::vector<double> found;
    for (const auto& row : metrics(name)) {
      EXPECT_EQ(row.at("rejected_failed"), 0) << name;
      EXPECT_GT(row.at("reward_mean"), 0) << name;
      found.push_back(row.at("loss").get<double>());
    }
    return found;
  };
  const std::vector<double> one = losses("one", 0, {});
  ASSERT_EQ(one.size(), 3u);
  const struct {
    const char* name;
    int ranks;
    Words settings;
  } layouts[] = {{"replicas", 2, {"parallel.dp=2"}},
                 {"tensor", 2, {"parallel.tp=2"}},
                 {"apart", 2, {"rl.rollout_ranks=1"}}};
  for (const auto& [name, ranks, settings] : layouts) {
    EXPECT_THAT(losses(name, ranks, settings),
                ::testing::Pointwise(::testing::DoubleNear(1e-9), one))
        << name;
  }
}

TEST_F(ReinforcementTest, HistoriesAreRenderedInEveryLayout) {
  const std::string file = (runs_.directory() / "tools.jsonl").string();
  std::ofstream rows(file);
  for (int i = 0; i < 12; ++i) {
    rows << nlohmann::json{{"prompt", "say " + std::to_string(i)},
                           {"meta", {{"turns", 2}, {"replies", "it rains"}}}}
         << "\n";
  }
  rows.close();
  const auto losses = [&](const std::string& name, int ranks, Words more) {
    Words all = {
        "data.train=" + file,
        "data.max_length=192",
        "model.dtype=float64",
        "train.max_steps=3",
        "rl.history=render",
        "rl.reward.command=[]",
        "rollout.stop=[e, a]",
        "rollout.max_new_tokens=48",
        "rl.reward.environment=[" + testing::built_path("tests/reward/heddle_reward_worker") + "]"};
    all.insert(all.end(), more.begin(), more.end());
    EXPECT_EQ(train(name, ranks, all), 0) << runs_.printed(name);
    std::vector<double> found;
    for (const auto& row : metrics(name)) {
      EXPECT_GT(row.at("forks"), 0) << name;
      found.push_back(row.at("loss").get<double>());
    }
    return found;
  };
  const std::vector<double> one = losses("one", 0, {});
  ASSERT_EQ(one.size(), 3u);
  for (const Words& layout :
       {Words{"parallel.dp=2"}, Words{"parallel.tp=2"}, Words{"rl.rollout_ranks=1"}}) {
    EXPECT_THAT(losses(layout[0], 2, layout),
                ::testing::Pointwise(::testing::DoubleNear(1e-9), one))
        << layout[0];
  }
}

TEST_F(ReinforcementTest, StalenessIsBoundedInEveryLayout) {
  const struct {
    const char* name;
    int ranks;
    Words settings;
  } layouts[] = {
      {"replicas", 3, {"rl.rollout_ranks=2", "rl.update_mode=keep"}},
      {"slices",
       4,
       {"rl.trainer_ranks=2", "rl.rollout_ranks=2", "rollout.tp=2", "parallel.fsdp=2"}},
  };
  for (const auto& [name, ranks, settings] : layouts) {
    Words all = {"rl.mode=async", "rl.max_staleness=2", "rl.old_logprobs=recompute"};
    all.insert(all.end(), settings.begin(), settings.end());
    ASSERT_EQ(train(name, ranks, all), 0) << runs_.printed(name);
    const auto rows = metrics(name);
    for (const auto& row : rows) EXPECT_LE(row.at("staleness_max"), 2) << name;
    expect_times(rows, name);
    EXPECT_EQ(rows.size(), 5u) << name;
    expect_ledger(name, 5);
  }
}

TEST_F(ReinforcementTest, WeightsOfRolloutsAreComparedWithTheTrainers) {
  const struct {
    const char* name;
    int ranks;
    Words settings;
  } layouts[] = {{"whole", 2, {"rl.rollout_ranks=1"}},
                 {"divided",
                  4,
                  {"rl.trainer_ranks=2", "rl.rollout_ranks=2", "rollout.tp=2", "parallel.fsdp=2"}},
                 {"replicas", 4, {"rl.trainer_ranks=2", "rl.rollout_ranks=2", "parallel.tp=2"}},
                 {"adapters",
                  4,
                  {"rl.trainer_ranks=2", "rl.rollout_ranks=2", "rollout.tp=2", "parallel.pp=2",
                   "train.method=lora", "adapter.rank=4", "train.recompute=full"}}};
  for (const auto& [name, ranks, settings] : layouts) {
    Words all = {"sync.verify=2", "train.max_steps=4", "optim.lr=1e-2"};
    all.insert(all.end(), settings.begin(), settings.end());
    ASSERT_EQ(train(name, ranks, all), 0) << runs_.printed(name);
    const auto rows = metrics(name);
    ASSERT_EQ(rows.size(), 4u) << name;
    // Version 0 goes out before the first step, which so has the bytes of two.
    EXPECT_GT(rows[1].at("sync_bytes"), 0) << name;
    EXPECT_EQ(rows[0].at("sync_bytes"), 2 * rows[1].at("sync_bytes").get<double>()) << name;
    EXPECT_EQ(rows[1].at("sync_damaged"), 0) << name;
    // Compared are versions 0, 2 and 4.
    const double tensors = rows[0].at("sync_verified");
    EXPECT_GT(tensors, 10) << name;
    EXPECT_EQ(rows[1].at("sync_verified"), tensors) << name;
    EXPECT_EQ(rows[2].at("sync_verified"), 0) << name;
    EXPECT_EQ(rows[3].at("sync_verified"), tensors) << name;
  }
  ASSERT_EQ(train("never", 2, {"rl.rollout_ranks=1", "sync.verify=0"}), 0);
  for (const auto& row : metrics("never")) EXPECT_EQ(row.at("sync_verified"), 0);
}

TEST_F(ReinforcementTest, ExpertsOfTheAnchorAreTrainedInEveryLayout) {
  const auto run = [&](const std::string& name, int ranks, Words more) {
    Words settings = {"model.dtype=float64",
                      "rl.epochs=2",
                      "rl.old_logprobs=recompute",
                      "rl.router_replay=r2",
                      "optim.lr=3e-2",
                      "train.max_steps=4",
                      "model.path=" + runs_.model("moe").string()};
    settings.insert(settings.end(), more.begin(), more.end());
    EXPECT_EQ(train(name, ranks, settings), 0) << runs_.printed(name);
    return metrics(name);
  };
  const auto one = run("one", 0, {});
  ASSERT_EQ(one.size(), 4u);
  EXPECT_EQ(one[0].at("router_agreement"), 1);
  EXPECT_LT(one[1].at("router_agreement"), 1);
  const struct {
    const char* name;
    int ranks;
    Words settings;
  } layouts[] = {{"experts", 2, {"parallel.fsdp=2", "parallel.ep=2"}},
                 {"tensors", 2, {"parallel.tp=2"}},
                 {"context", 3, {"rl.rollout_ranks=1", "parallel.cp=2"}},
                 {"stages", 2, {"parallel.pp=2", "train.recompute=full"}}};
  for (const auto& [name, ranks, settings] : layouts) {
    const auto found = run(name, ranks, settings);
    expect_same(found, one, {"loss", "grad_norm", "ratio_max", "router_agreement"}, name);
  }
}

TEST_F(ReinforcementTest, WrongNumbersOfRanksAreRefused) {
  EXPECT_EQ(train("alone", 0, {"rl.rollout_ranks=1"}), 2);
  EXPECT_NE(runs_.printed("alone").find("heddle launch --nproc 2"), std::string::npos)
      << runs_.printed("alone");
  EXPECT_EQ(train("few", 2, {"rl.rollout_ranks=1", "rl.trainer_ranks=2"}), 2);
  EXPECT_NE(runs_.printed("few").find("the job needs 3 ranks and has 2"), std::string::npos)
      << runs_.printed("few");
  EXPECT_EQ(train("layout", 2, {"rl.rollout_ranks=1", "parallel.fsdp=2"}), 2);
  EXPECT_NE(runs_.printed("layout").find("start it with heddle launch --nproc 3"),
            std::string::npos)
      << runs_.printed("layout");
}

TEST_F(ReinforcementTest, AnErrorBeforeTheyMeetEndsTheOtherSide) {
  const struct {
    const char* setting;
    int fails, learns;
  } cases[] = {{"data.eval=nowhere.jsonl", 0, 1}, {"rl.reward.command=[./nothing]", 1, 0}};
  for (const auto& [setting, fails, learns] : cases) {
    const std::string run = "error-" + std::to_string(fails);
    EXPECT_EQ(train(run, 2, {"rl.rollout_ranks=1", "sync.rendezvous_timeout_s=300", setting}), 2);
    // It said so itself: nobody had to end it.
    const std::string log = files::read(log_dir(run) + "/rank-" + std::to_string(learns) + ".log");
    EXPECT_NE(log.find("rank " + std::to_string(fails) + " failed: "), std::string::npos) << log;
  }
}

TEST_F(ReinforcementTest, RecipesMakeTheirFirstSteps) {
  const struct {
    const char* recipe;
    const char* model;
    int ranks;
    std::map<std::string, std::string> environment;
  } recipes[] = {{"rl_colocated_0.8b", "dense", 0, {}},
                 {"rl_async_1p1_4b_lora", "dense", 2, {}},
                 {"rl_moe_35b_a3b", "moe", 8, {}},
                 {"rl_async_ascend", "dense", 2, {{"HEDDLE_SIM_NPU", "1"}}}};
  for (const auto& [recipe, model, ranks, environment] : recipes) {
    Words words = command(recipe, ranks, {"rl.reward.verifiers.math=0", "train.max_steps=2"});
    words.insert(std::ranges::find(words, "rl") + 1,
                 testing::source_path(std::string("recipes/") + recipe + ".yaml"));
    std::ranges::replace(words, "model.path=" + runs_.model("dense").string(),
                         "model.path=" + runs_.model(model).string());
    EXPECT_EQ(testing::wait_for(testing::start_heddle(words, runs_.log_of(recipe), environment)), 0)
        << runs_.printed(recipe);
    EXPECT_EQ(metrics(recipe).size(), 2u) << recipe;
  }
}

TEST_F(ReinforcementTest, KilledRankEndsTheJobAndTheNextStartLosesNothing) {
  const Words settings = {"rl.rollout_ranks=1", "rl.mode=async", "rl.max_staleness=1",
                          "ckpt.every=1", "train.max_steps=40"};
  // The trainer's process, then the rollout's.
  for (const std::size_t victim : {0u, 1u}) {
    // Two steps further than the start before came.
    const auto latest = ckpt::latest_complete_checkpoint(checkpoints("killed"));
    const auto next = checkpoints("killed") / ckpt::step_name((latest ? latest->step : 0) + 2);
    const pid_t launcher =
        testing::start_heddle(command("killed", 2, settings), runs_.log_of("killed"));
    ASSERT_TRUE(testing::has_made(launcher, next)) << runs_.printed("killed");
    const std::vector<pid_t> ranks = testing::children_of(launcher);
    ASSERT_EQ(ranks.size(), 2u);
    kill(ranks[victim], SIGKILL);
    EXPECT_EQ(testing::wait_for(launcher), 128 + SIGKILL) << runs_.printed("killed");
    for (const pid_t rank : ranks) EXPECT_NE(kill(rank, 0), 0) << "rank " << rank << " lives";
  }
  ASSERT_EQ(train("killed", 2, settings), 0) << runs_.printed("killed");
  EXPECT_EQ(metrics("killed").size(), 40u);
  expect_ledger("killed", 40);
}

TEST_F(ReinforcementTest, FrozenRankIsNamedByItsNumberInTheJob) {
  const Words settings = {"rl.rollout_ranks=1", "ckpt.every=1", "train.max_steps=4000",
                          "sync.timeout_s=8", "parallel.timeout_s=8"};
  for (const std::size_t victim : {0u, 1u}) {
    const std::string run = "frozen-" + std::to_string(victim);
    const pid_t launcher = testing::start_heddle(command(run, 2, settings), runs_.log_of(run));
    ASSERT_TRUE(testing::has_made(launcher, checkpoints(run) / "step-00000002"))
        << runs_.printed(run);
    const std::vector<pid_t> ranks = testing::children_of(launcher);
    ASSERT_EQ(ranks.size(), 2u);
    kill(ranks[victim], SIGSTOP);
    EXPECT_EQ(testing::wait_for(launcher), 1);
    const std::string side = victim == 0 ? "rank 0, the first of the trainers"
                                         : "no rollout is left: rank 1 gave no sign of life";
    const std::string other = victim == 0 ? "from rank 0" : side;
    EXPECT_THAT(runs_.printed(run), AnyOf(::testing::HasSubstr(side), ::testing::HasSubstr(other)));
    for (const pid_t rank : ranks) EXPECT_NE(kill(rank, 0), 0) << "rank " << rank << " lives";
  }
}

TEST_F(ReinforcementTest, InterruptedRunSavesAndGoesOn) {
  const Words settings = {"rl.rollout_ranks=1", "train.max_steps=40", "ckpt.every=1",
                          "ckpt.keep_last=40"};
  const pid_t launcher =
      testing::start_heddle(command("stopped", 2, settings), runs_.log_of("stopped"));
  ASSERT_TRUE(testing::has_made(launcher, checkpoints("stopped") / "step-00000002"))
      << runs_.printed("stopped");
  kill(launcher, SIGINT);
  EXPECT_EQ(testing::wait_for(launcher), 0) << runs_.printed("stopped");
  EXPECT_LT(metrics("stopped").size(), 40u);
  ASSERT_EQ(train("stopped", 2, settings), 0) << runs_.printed("stopped");
  expect_ledger("stopped", 40);
  // A run of its own from the last checkpoint of this one.
  const auto from = checkpoints("stopped") / "step-00000038";
  ASSERT_EQ(train("other", 2,
                  {"rl.rollout_ranks=1", "train.max_steps=40", "ckpt.every=1",
                   "train.resume=" + from.string()}),
            0)
      << runs_.printed("other");
  EXPECT_EQ(weights("other"), weights("stopped"));
  const rl::Ledger ledger(runs_.directory() / "other" / "ledger.log");
  EXPECT_EQ(ledger.state().step, 40);
  EXPECT_EQ(ledger.state().consumed, 2 * kGroups);
}

TEST_F(ReinforcementTest, FinishedGroupsAreConsumedAfterAResume) {
  const struct {
    const char* name;
    int ranks;
    Words layout;
  } runs[] = {{"apart", 2, {"rl.rollout_ranks=1"}},
              {"sliced", 3, {"rl.trainer_ranks=2", "rl.rollout_ranks=1", "parallel.tp=2"}},
              {"divided", 2, {"parallel.fsdp=2"}}};
  for (const auto& [name, ranks, layout] : runs) {
    const auto settings = [&](const char* steps) {
      Words all = {"rl.mode=async",
                   "rl.max_staleness=2",
                   "rl.deterministic=true",
                   "rl.update_mode=wait",
                   "optim.schedule=constant",  // whatever the number of steps
                   std::string("train.max_steps=") + steps};
      all.insert(all.end(), layout.begin(), layout.end());
      return all;
    };
    const auto file = runs_.directory() / name / "ledger.log";
    ASSERT_EQ(train(name, ranks, settings("3")), 0) << runs_.printed(name);
    const rl::LedgerState before = rl::Ledger(file).state();
    // All groups that the weights before the last admitted were finished before these came.
    EXPECT_GE(std::ssize(before.completed), 2 * kGroups) << name;
    ASSERT_EQ(train(name, ranks, settings("6")), 0) << runs_.printed(name);
    expect_ledger(name, 6);
    std::map<std::int64_t, int> times;
    std::ifstream lines(file);
    for (std::string line; std::getline(lines, line);) {
      const auto record = nlohmann::json::parse(line.substr(line.find('{')));
      if (record.contains("dispatched"))
        ++times[record["dispatched"]["cursor"].get<std::int64_t>()];
    }
    for (const auto& [cursor, dispatch] : before.pending)
      EXPECT_EQ(times[cursor], before.completed.contains(cursor) ? 1 : 2) << name << cursor;
  }
  // Where nothing was under way, the run is the one that was not interrupted.
  ASSERT_EQ(
      train("whole", 2,
            {"rl.mode=async", "rl.max_staleness=2", "rl.deterministic=true", "rl.update_mode=wait",
             "optim.schedule=constant", "train.max_steps=6", "parallel.fsdp=2"}),
      0)
      << runs_.printed("whole");
  EXPECT_TRUE(weights("divided") == weights("whole"));
}

}  // namespace
}  // namespace heddle
