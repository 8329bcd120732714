// `heddle rl` has the numbers of one rank in every layout: experts, critic, corrections.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "dist/reinforcement_run.h"

namespace heddle {
namespace {

TEST_F(ReinforcementTest, ExpertsOfGenerationAreTrainedInEveryLayout) {
  // With updates in between the router chooses others than those that drew a token.
  const auto run = [&](const std::string& name, int ranks, Words more) {
    Words settings = {"model.dtype=float64",
                      "rl.mode=async",
                      "rl.max_staleness=2",
                      "rl.update_mode=keep",
                      "optim.lr=3e-2",
                      "rollout.max_sequences=5",
                      "rollout.max_new_tokens=12",
                      "model.path=" + runs_.model("moe").string()};
    settings.insert(settings.end(), more.begin(), more.end());
    EXPECT_EQ(train(name, ranks, settings), 0) << runs_.printed(name);
    return metrics(name);
  };
  const auto stale = run("r3", 0, {}), own = run("own", 0, {"rl.router_replay=off"});
  ASSERT_EQ(stale.size(), 5u);
  ASSERT_EQ(own.size(), 5u);
  double differs = 0;
  for (std::size_t i = 0; i < stale.size(); ++i) {
    differs = std::max(differs, std::abs(stale[i].at("mismatch_abs_mean").get<double>() -
                                         own[i].at("mismatch_abs_mean").get<double>()));
  }
  EXPECT_GT(differs, 1e-3);
  // Two data ranks finish completions in another order than one, so that others are stale. In mode
  // sync none is.
  const Words in_turn = {"rl.mode=sync", "rl.router_replay=r3"};
  const auto sync = run("in-turn", 0, in_turn);
  const struct {
    const char* name;
    int ranks;
    Words settings;
    bool is_sync;
  } layouts[] = {
      {"experts", 2, {"parallel.fsdp=2", "parallel.ep=2", in_turn[0], in_turn[1]}, true},
      {"context", 3, {"rl.rollout_ranks=1", "parallel.cp=2", in_turn[0], in_turn[1]}, true},
      {"tensors", 2, {"parallel.tp=2"}, false},
      {"stages", 2, {"parallel.pp=2", "train.recompute=full"}, false}};
  for (const auto& [name, ranks, settings, is_sync] : layouts) {
    const auto& one = is_sync ? sync : stale;
    const auto found = run(name, ranks, settings);
    expect_same(found, one, {"loss", "grad_norm", "mismatch_abs_mean", "router_agreement"}, name);
  }
}

TEST_F(ReinforcementTest, ExpertsOfGenerationReachTheAnchorInEveryLayout) {
  const auto run = [&](const std::string& name, int ranks, Words more) {
    Words settings = {"model.dtype=float64",
                      "rl.mode=async",
                      "rl.max_staleness=2",
                      "rl.update_mode=keep",
                      "rl.epochs=2",
                      "rl.old_logprobs=recompute",
                      "optim.lr=3e-2",
                      "train.max_steps=6",
                      "rollout.max_sequences=5",
                      "rollout.max_new_tokens=12",
                      "model.path=" + runs_.model("moe").string()};
    settings.insert(settings.end(), more.begin(), more.end());
    EXPECT_EQ(train(name, ranks, settings), 0) << runs_.printed(name);
    const auto rows = metrics(name);
    EXPECT_EQ(rows.size(), 6u) << name;
    double agreement = 1;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      agreement = std::min(agreement, rows[i].at("router_agreement").get<double>());
      // The policy before the first step is the anchor, by experts that it would not choose itself.
      EXPECT_EQ(std::abs(rows[i].at("ratio_max").get<double>() - 1) < 1e-9, i % 2 == 0)
          << name << i;
    }
    EXPECT_LT(agreement, 0.99) << name;
    return rows;
  };
  const auto one = run("one", 0, {});
  run("experts", 2, {"parallel.fsdp=2", "parallel.ep=2"});
  const struct {
    const char* name;
    Words settings;
  } layouts[] = {{"tensors", {"parallel.tp=2"}},
                 {"stages", {"parallel.pp=2", "train.recompute=full"}}};
  for (const auto& [name, settings] : layouts) {
    const auto found = run(name, 2, settings);
    for (std::size_t i = 0; i < found.size(); ++i) {
      for (const char* figure : {"loss", "grad_norm", "mismatch_k1", "mismatch_k3",
                                 "router_missing", "router_replayed", "router_agreement"}) {
        const double expected = one[i].at(figure);
        EXPECT_NEAR(found[i].at(figure).get<double>(), expected, 1e-8 * (1 + std::abs(expected)))
            << name << " " << i << " " << figure;
      }
    }
  }
}

TEST_F(ReinforcementTest, PinnedAdaptersAreTheSameInEveryLayout) {
  const auto run = [&](const std::string& name, int ranks, Words more) {
    Words settings = {"model.dtype=float64", "optim.lr=1e-2", "optim.schedule=constant",
                      "train.max_steps=6", "train.method=lora", "adapter.rank=4",
                      // All groups that may run do, so that the order in which they end is one.
                      "rl.mode=async", "rl.max_staleness=2", "rollout.max_sequences=200",
                      "rl.update_mode=pin", "rl.old_logprobs=recompute"};
    settings.insert(settings.end(), more.begin(), more.end());
    EXPECT_EQ(train(name, ranks, settings), 0) << runs_.printed(name);
    return metrics(name);
  };
  const auto one = run("one", 0, {});
  ASSERT_EQ(one.size(), 6u);
  EXPECT_GT(one[4].at("staleness_max"), 0);
  EXPECT_GT(one[4].at("mismatch_k3"), 1e-9);
  for (const auto& [name, settings] :
       {std::pair<const char*, Words>{"replicas", {"parallel.dp=2"}},
        {"sharded", {"parallel.fsdp=2"}},
        {"layers", {"parallel.fsdp=2", "rollout.gather_weights=false"}},
        {"tensors", {"parallel.tp=2"}},
        {"stages", {"parallel.pp=2"}}}) {
    const auto found = run(name, 2, settings);
    expect_same(found, one, {"loss", "grad_norm", "staleness_max", "mismatch_k3"}, name);
  }
}

TEST_F(ReinforcementTest, ErrorsAreToldWherePinnedAdaptersAreGathered) {
  // The engine holds values of the adapters' versions when the reward fails.
  EXPECT_EQ(train("fails", 2,
                  {"train.method=lora", "adapter.rank=4", "rl.mode=async", "rl.max_staleness=2",
                   "parallel.fsdp=2", "rl.reward.command=[/bin/false]"}),
            1);
  EXPECT_THAT(runs_.printed("fails"),
              ::testing::HasSubstr("rl.reward.command: '/bin/false' was started"));
}

TEST_F(ReinforcementTest, AdaptersOfExpertsReachRolloutsThatDivideThem) {
  // The first publication is compared by hashes while no pass runs; at the end no version is held.
  for (const char* mode : {"pin", "recompute"}) {
    const Words settings = {"model.path=" + runs_.model("moe").string(),
                            "train.method=lora",
                            "adapter.rank=4",
                            "adapter.target_parameters=[mlp.experts.gate_up_proj]",
                            "rl.mode=async",
                            "rl.max_staleness=2",
                            "rl.rollout_ranks=4",
                            "rollout.tp=2",
                            "train.max_steps=2",
                            std::string("rl.update_mode=") + mode};
    EXPECT_EQ(train(mode, 5, settings), 0) << runs_.printed(mode);
    EXPECT_EQ(metrics(mode).size(), 2u);
  }
}

TEST_F(ReinforcementTest, CriticIsTheSameInEveryLayout) {
  const auto run = [&](const std::string& name, int ranks, Words more) {
    Words settings = {"model.dtype=float64",      "rl.algorithm.advantage=gae",
                      "rl.critic.lr=1e-2",        "rl.algorithm.lambda=0.9",
                      "rl.critic.warmup_steps=1", "optim.schedule=constant"};
    settings.insert(settings.end(), more.begin(), more.end());
    EXPECT_EQ(train(name, ranks, settings), 0) << runs_.printed(name);
    return metrics(name);
  };
  const Words lora = {"train.method=lora", "adapter.rank=4"};
  const struct {
    const char* name;
    int ranks;
    Words settings;
    bool is_lora;
  } layouts[] = {{"sharded", 2, {"parallel.fsdp=2"}, false},
                 {"tensors", 2, {"parallel.tp=2"}, false},
                 {"stages", 2, {"parallel.pp=2", "train.recompute=full"}, false},
                 {"apart", 2, {"rl.rollout_ranks=1"}, false},
                 {"adapted", 2, {"parallel.fsdp=2", "train.method=lora", "adapter.rank=4"}, true}};
  const auto full = run("one", 0, {}), adapted = run("one-adapted", 0, lora);
  ASSERT_EQ(full.size(), 5u);
  EXPECT_EQ(full[0].at("lr"), 0);
  for (const auto& [name, ranks, settings, is_lora] : layouts) {
    const auto& one = is_lora ? adapted : full;
    const auto found = run(name, ranks, settings);
    expect_same(found, one,
                {"loss", "grad_norm", "value_loss", "explained_variance", "critic_grad_norm"},
                name);
  }
  // Another layout goes on from what this one saved.
  const Words half = {"train.max_steps=3"};
  run("parts", 0, half);
  run("parts", 2, {"parallel.fsdp=2"});
  const auto parts = metrics("parts");
  ASSERT_EQ(parts.size(), 5u);
  EXPECT_NEAR(parts[4].at("value_loss").get<double>(), full[4].at("value_loss").get<double>(),
              1e-8);
  EXPECT_NEAR(parts[4].at("loss").get<double>(), full[4].at("loss").get<double>(), 1e-8);
}

// No completion of a random policy ends before the limit, so that nothing is learnt: the last
// stage has no gradient for the embedding that it shares with the first, which has one of zeros.
TEST_F(ReinforcementTest, StepsWithoutLossLeaveThePolicyInEveryLayout) {
  const struct {
    const char* name;
    int ranks;
    Words settings;
  } layouts[] = {{"one", 0, {}},
                 {"stages", 2, {"parallel.pp=2"}},
                 {"interleaved", 2, {"parallel.pp=2", "parallel.pp_schedule=interleaved"}},
                 {"sharded", 2, {"parallel.fsdp=2"}},
                 {"tensors", 2, {"parallel.tp=2"}}};
  for (const auto& [name, ranks, settings] : layouts) {
    Words words = {"model.dtype=float64", "rl.overlong=mask", "train.max_steps=2",
                   "train.grad_cosine=true"};
    words.insert(words.end(), settings.begin(), settings.end());
    ASSERT_EQ(train(name, ranks, words), 0) << runs_.printed(name);
    const auto rows = metrics(name);
    ASSERT_EQ(rows.size(), 2u) << name;
    for (const nlohmann::json& row : rows) {
      EXPECT_EQ(row.at("loss"), 0) << name;
      EXPECT_EQ(row.at("grad_norm"), 0) << name;
    }
    EXPECT_EQ(weights(name), weights("one")) << name;
  }
}

TEST_F(ReinforcementTest, CorrectionsReferenceAndEntropyAreTheSameInEveryLayout) {
  const auto run = [&](const std::string& name, int ranks, Words more) {
    Words settings = {"model.dtype=float64", "rl.old_logprobs=recompute", "optim.lr=1e-2",
                      "optim.schedule=constant", "train.max_steps=6",
                      // All groups that may run do, so that the order in which they end is one.
                      "rl.mode=async", "rl.max_staleness=2", "rollout.max_sequences=200",
                      "rl.correction.rs=token", "rl.correction.rs_bounds=[0.98, 1.02]",
                      "rl.correction.rs_denominator=drop", "rl.correction.is_batch_normalize=true",
                      "rl.reference.kl_coef=0.1", "rl.reference.sync_every=2",
                      "rl.algorithm.entropy_target=9", "rl.algorithm.entropy_coef=0.01"};
    settings.insert(settings.end(), more.begin(), more.end());
    EXPECT_EQ(train(name, ranks, settings), 0) << runs_.printed(name);
    return metrics(name);
  };
  const Words lora = {"train.method=lora", "adapter.rank=4"};
  const struct {
    const char* name;
    int ranks;
    Words settings;
    bool is_lora;
  } layouts[] = {{"sharded", 2, {"parallel.fsdp=2"}, false},
                 {"replicas", 2, {"parallel.dp=2"}, false},
                 {"tensors", 2, {"parallel.tp=2"}, false},
                 {"stages", 2, {"parallel.pp=2", "train.recompute=full"}, false},
                 {"adapted", 2, {"parallel.fsdp=2", lora[0], lora[1]}, true},
                 {"adapted-tensors", 2, {"parallel.tp=2", lora[0], lora[1]}, true}};
  const auto full = run("one", 0, {}), adapted = run("one-adapted", 0, lora);
  for (const auto* one : {&full, &adapted}) {
    ASSERT_EQ(one->size(), 6u);
    for (std::size_t i = 0; i < 6; ++i)
      EXPECT_EQ(std::abs(one->at(i).at("kl_ref").get<double>()) < 1e-12, i % 2 == 0) << i;
    EXPECT_GT(one->at(1).at("rejected_tokens"), 0);
    EXPECT_LT(one->at(1).at("rejected_tokens"), 1);
    EXPECT_NEAR(one->at(3).at("entropy_coef").get<double>(), 0.025, 1e-12);
  }
  for (const auto& [name, ranks, settings, is_lora] : layouts) {
    const auto& one = is_lora ? adapted : full;
    const auto found = run(name, ranks, settings);
    expect_same(found, one,
                {"loss", "grad_norm", "kl_ref", "rejected_tokens", "mismatch_ess", "entropy"},
                name);
  }
  // Another layout goes on from the reference that this one saved. In mode async groups under way
  // would be others.
  const auto whole = run("whole", 0, {"rl.mode=sync"});
  run("parts", 0, {"rl.mode=sync", "train.max_steps=3"});
  run("parts", 2, {"rl.mode=sync", "parallel.fsdp=2"});
  const auto parts = metrics("parts");
  ASSERT_EQ(parts.size(), 6u);
  EXPECT_GT(parts[3].at("kl_ref"), 1e-7);
  for (const std::size_t i : {3u, 5u}) {
    for (const char* figure : {"loss", "kl_ref", "entropy_coef"})
      EXPECT_NEAR(parts[i].at(figure).get<double>(), whole[i].at(figure).get<double>(), 1e-9) << i;
  }
}

}  // namespace
}  // namespace heddle
