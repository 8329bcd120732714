// The ranks of a job may be started by any launcher, and one rank needs none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <cmath>

#include <fmt/format.h>

#include "dist/launched_run.h"
#include "testing/free_port.h"

namespace heddle {
namespace {

using testing::LaunchedRuns;
using Environment = std::map<std::string, std::string>;
using Words = std::vector<std::string>;

const Words kShort = {"train.max_steps=2", "model.dtype=float64"};

class LaunchersTest : public ::testing::Test {
 protected:
  /// Runs one process per environment and expects what one rank without any gives.
  void expect_same_as_alone(const std::vector<Environment>& environments, Words words) {
    ASSERT_EQ(runs_.run("alone", 0, "dense", kShort), 0) << runs_.printed("alone");
    words.insert(words.end(), kShort.begin(), kShort.end());
    std::vector<pid_t> ranks;
    for (std::size_t r = 0; r < environments.size(); ++r) {
      ranks.push_back(testing::start_heddle(runs_.command("run", 0, "dense", words),
                                            runs_.log_of("rank" + std::to_string(r)),
                                            environments[r]));
    }
    for (std::size_t r = 0; r < ranks.size(); ++r)
      EXPECT_EQ(testing::wait_for(ranks[r]), 0) << runs_.printed("rank" + std::to_string(r));
    const auto expected = runs_.metrics("alone"), found = runs_.metrics("run");
    ASSERT_EQ(found.size(), 2u);
    for (std::size_t i = 0; i < 2; ++i)
      EXPECT_NEAR(found[i].loss, expected[i].loss, 1e-9 * expected[i].loss);
  }

  /// Starts the launcher of one of two hosts.
  pid_t host(const std::string& node, const std::string& master, const std::string& processes,
             const std::string& run, const Words& more) {
    Words words = {"launch",
                   "--nproc",
                   processes,
                   "--nnodes",
                   "2",
                   "--node-rank",
                   node,
                   "--master",
                   master,
                   "--log-dir",
                   runs_.log_of("hosts").string() + "s",
                   "--"};
    Words all = kShort;
    all.insert(all.end(), more.begin(), more.end());
    for (const std::string& word : runs_.command(run, 0, "dense", all)) words.push_back(word);
    return testing::start_heddle(words, runs_.log_of("host" + node));
  }

  static std::string port() { return std::to_string(testing::free_port()); }

  LaunchedRuns runs_;
};

TEST_F(LaunchersTest, WorldSizeOneGivesTheBitsOfNoEnvironment) {
  expect_same_as_alone({{{"WORLD_SIZE", "1"}, {"RANK", "0"}}}, {});
  EXPECT_EQ(files::read(runs_.directory() / "run/final/model.safetensors"),
            files::read(runs_.directory() / "alone/final/model.safetensors"));
}

TEST_F(LaunchersTest, TorchrunsVariables) {
  const std::string free = port();
  std::vector<Environment> ranks;
  for (const char* r : {"0", "1"}) {
    ranks.push_back({{"RANK", r},
                     {"WORLD_SIZE", "2"},
                     {"LOCAL_RANK", r},
                     {"LOCAL_WORLD_SIZE", "2"},
                     {"MASTER_ADDR", "localhost"},
                     {"MASTER_PORT", free}});
  }
  expect_same_as_alone(ranks, {"parallel.dp=2"});
}

TEST_F(LaunchersTest, SlurmsVariables) {
  const std::string free = port();
  std::vector<Environment> ranks;
  for (const char* r : {"0", "1"}) {
    ranks.push_back({{"SLURM_PROCID", r},
                     {"SLURM_NTASKS", "2"},
                     {"SLURM_LOCALID", r},
                     {"SLURM_JOB_ID", "77"},
                     {"SLURM_STEP_ID", "0"},
                     {"SLURM_STEP_NODELIST", "localhost"},
                     {"MASTER_PORT", free}});
  }
  expect_same_as_alone(ranks, {"parallel.fsdp=2"});
}

TEST_F(LaunchersTest, OpenMpisVariables) {
  const std::string free = port();
  std::vector<Environment> ranks;
  for (const char* r : {"0", "1"}) {
    ranks.push_back({{"OMPI_COMM_WORLD_RANK", r},
                     {"OMPI_COMM_WORLD_SIZE", "2"},
                     {"OMPI_COMM_WORLD_LOCAL_RANK", r},
                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                     {"MASTER_PORT", free}});
  }
  expect_same_as_alone(ranks, {"parallel.dp=auto"});
}

TEST_F(LaunchersTest, TwoHosts) {
  // Two launchers stand for two hosts.
  ASSERT_EQ(runs_.run("alone", 0, "dense", kShort), 0);
  const std::string master = "127.0.0.1:" + port();
  std::vector<pid_t> hosts;
  for (const char* node : {"1", "0"})
    hosts.push_back(host(node, master, "1", "run", {"parallel.fsdp=2"}));
  for (const pid_t launcher : hosts) EXPECT_EQ(testing::wait_for(launcher), 0);
  EXPECT_NEAR(runs_.metrics("run").at(1).loss, runs_.metrics("alone").at(1).loss, 1e-8);
}

TEST_F(LaunchersTest, AFrozenHostOfTheStoreEndsTheOthersAtTheDeadline) {
  // Rank 0 serves the store where no launcher of ours does.
  for (const Words& layout :
       {Words{"parallel.tp=2"}, {"parallel.pp=2"}, {"parallel.fsdp=2", "ckpt.every=1"}}) {
    const std::string free = port();
    Words words = layout;
    words.insert(words.end(), {"train.max_steps=100000", "parallel.timeout_s=8"});
    std::array<pid_t, 2> ranks{};
    for (std::size_t r = 0; r < 2; ++r) {
      const std::string rank = std::to_string(r);
      ranks[r] = testing::start_heddle(runs_.command("run", 0, "dense", words),
                                       runs_.log_of("rank" + rank),
                                       {{"OMPI_COMM_WORLD_RANK", rank},
                                        {"OMPI_COMM_WORLD_SIZE", "2"},
                                        {"OMPI_COMM_WORLD_LOCAL_RANK", rank},
                                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                        {"MASTER_PORT", free}});
    }
    EXPECT_TRUE(testing::has_made(ranks[0], runs_.directory() / "run/metrics.jsonl"));
    kill(ranks[0], SIGSTOP);
    EXPECT_TRUE(testing::has_ended_within(ranks[1], std::chrono::seconds(60))) << layout.front();
    kill(ranks[0], SIGKILL);
    testing::wait_for(ranks[0]);
    EXPECT_NE(testing::wait_for(ranks[1]), 0);
    EXPECT_THAT(runs_.printed("rank1"), ::testing::HasSubstr("error:")) << layout.front();
    std::filesystem::remove_all(runs_.directory() / "run");
  }
}

/// Two processes that a launcher other than ours started with different words.
class DifferingRanksTest : public LaunchersTest {
 protected:
  /// Both end with status 2, and soon, and say `parts`.
  void expect_refused(const std::array<Environment, 2>& environments,
                      const std::array<Words, 2>& words, const std::vector<std::string>& parts) {
    const auto begun = std::chrono::steady_clock::now();
    std::array<pid_t, 2> ranks{};
    for (std::size_t r = 0; r < 2; ++r)
      ranks[r] = testing::start_heddle(words[r], log(r), environments[r]);
    for (std::size_t r = 0; r < 2; ++r) {
      EXPECT_EQ(testing::wait_for(ranks[r]), 2);
      for (const std::string& part : parts)
        EXPECT_THAT(files::read(log(r)), ::testing::HasSubstr(part));
    }
    // The deadline is two minutes.
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(60));
  }
  std::filesystem::path log(std::size_t rank) const {
    return runs_.log_of("rank" + std::to_string(rank));
  }
  Words train(const Words& more) const {
    Words all = kShort;
    all.insert(all.end(), more.begin(), more.end());
    return runs_.command("run", 0, "dense", all);
  }
  std::string at(const std::string& name) const { return (runs_.directory() / name).string(); }

  static std::array<Environment, 2> torchrun() {
    const std::string free = port();
    const auto rank = [&](const char* r) {
      return Environment{{"RANK", r},
                         {"WORLD_SIZE", "2"},
                         {"LOCAL_RANK", "0"},
                         {"LOCAL_WORLD_SIZE", "1"},
                         {"MASTER_ADDR", "127.0.0.1"},
                         {"MASTER_PORT", free}};
    };
    return {rank("0"), rank("1")};
  }
  static std::array<Environment, 2> slurm() {
    const std::string free = port();
    const auto rank = [&](const char* r) {
      return Environment{{"SLURM_PROCID", r},    {"SLURM_NTASKS", "2"},
                         {"SLURM_LOCALID", "0"}, {"SLURM_JOB_ID", "78"},
                         {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NODELIST", "localhost"},
                         {"MASTER_PORT", free}};
    };
    return {rank("0"), rank("1")};
  }
};

TEST_F(DifferingRanksTest, ConfigurationsAreRefusedWithKeyValuesAndRanks) {
  expect_refused(torchrun(),
                 {train({"parallel.fsdp=2"}), train({"parallel.fsdp=2", "optim.lr=5e-3"})},
                 {"the configuration is not the same on all ranks",
                  "optim.lr is 0.0001 on rank 0 and 0.005 on rank 1"});
  // Layouts too: their collectives would wait for each other.
  expect_refused(slurm(), {train({"parallel.fsdp=2"}), train({"parallel.tp=2"})},
                 {"parallel.fsdp is 2 on rank 0 and 1 on rank 1",
                  "parallel.tp is 1 on rank 0 and 2 on rank 1"});
  // A mistake of one rank ends the other as well.
  const std::array<Environment, 2> ranks = torchrun();
  const pid_t waiting = testing::start_heddle(train({"parallel.fsdp=2"}), log(0), ranks[0]);
  EXPECT_EQ(testing::wait_for(testing::start_heddle(train({"optim.rl=1"}), log(1), ranks[1])), 2);
  EXPECT_NE(testing::wait_for(waiting), 0);
  EXPECT_THAT(files::read(log(0)),
              ::testing::HasSubstr("rank 1 failed: command line: unknown key 'optim.rl'"));
}

TEST_F(DifferingRanksTest, DataAndModelsAreRefused) {
  std::filesystem::copy(runs_.model("dense"), at("other"));
  std::filesystem::copy(at("train.jsonl"), at("same.jsonl"));
  std::filesystem::copy(at("train.jsonl"), at("longer.jsonl"));
  std::ofstream(at("longer.jsonl"), std::ios::app) << R"({"text": "one more"})"
                                                   << "\n";
  // Paths, threads and cache may differ by host: this runs.
  const auto free = torchrun();
  std::array<pid_t, 2> ranks{};
  const std::array<Words, 2> words = {
      Words{"parallel.fsdp=2"},
      {"parallel.fsdp=2", "data.train=" + at("same.jsonl"), "model.path=" + at("other"),
       "data.cache_dir=" + at("cache"), "device.threads=2", "log.level=debug"}};
  for (std::size_t r = 0; r < 2; ++r)
    ranks[r] = testing::start_heddle(train(words[r]), log(r), free[r]);
  for (std::size_t r = 0; r < 2; ++r)
    EXPECT_EQ(testing::wait_for(ranks[r]), 0) << files::read(log(r));

  expect_refused(torchrun(),
                 {train({"parallel.fsdp=2", "train.output_dir=" + at("run2")}),
                  train({"parallel.fsdp=2", "train.output_dir=" + at("run2"),
                         "data.train=" + at("longer.jsonl")})},
                 {"the data is not the same on all ranks",
                  "data.train is " + at("train.jsonl") + " with 64 rows",
                  at("longer.jsonl") + " with 65 rows", "on rank 1"});
  // Other weights of the same shapes.
  std::string weights = files::read(at("other") + "/model.safetensors");
  for (std::size_t i = weights.size() / 2; i < weights.size(); ++i) weights[i] ^= 1;
  files::write_atomically(at("other") + "/model.safetensors", weights);
  expect_refused(
      torchrun(),
      {train({"parallel.fsdp=2", "train.output_dir=" + at("run3")}),
       train({"parallel.fsdp=2", "train.output_dir=" + at("run3"), "model.path=" + at("other")})},
      {"the set of weights is " + at("dense"), at("other")});
}

TEST_F(DifferingRanksTest, ScoreAndBenchAreComparedToo) {
  const auto score = [&](const std::string& model, const std::string& input) {
    return Words{"score",    runs_.model(model), "--input",         at(input),
                 "--output", at("out.jsonl"),    "parallel.fsdp=2", "parallel.timeout_s=120"};
  };
  expect_refused(torchrun(), {score("dense", "train.jsonl"), score("dense", "pairs.jsonl")},
                 {"--input is " + at("train.jsonl"), at("pairs.jsonl")});
  expect_refused(slurm(), {score("dense", "train.jsonl"), score("moe", "train.jsonl")},
                 {"config.json of the model is " + at("dense"), at("moe")});
  const auto bench = [&](const std::string& length) {
    return Words{"bench",    "step", "--preset",        "small-2m",
                 "--length", length, "parallel.fsdp=2", "parallel.timeout_s=120"};
  };
  expect_refused(torchrun(), {bench("64"), bench("128")},
                 {"--length is 64 on rank 0 and 128 on rank 1"});
}

TEST_F(LaunchersTest, HostsThatWereToldDifferentThingsAreToldWhich) {
  const auto begun = std::chrono::steady_clock::now();
  std::string master = "127.0.0.1:" + port();
  const pid_t first = host("0", master, "1", "run", {"parallel.fsdp=2"});
  const pid_t second = host("1", master, "1", "run", {"parallel.fsdp=2", "optim.lr=5e-3"});
  EXPECT_EQ(testing::wait_for(first), 2);
  EXPECT_EQ(testing::wait_for(second), 2);
  for (const char* name : {"host0", "host1"}) {
    EXPECT_THAT(runs_.printed(name),
                ::testing::HasSubstr("optim.lr is 0.0001 on rank 0 and 0.005 on rank 1"));
  }
  // More ranks on one of them.
  master = "127.0.0.1:" + port();
  const pid_t waiting = host("0", master, "1", "run", {"parallel.fsdp=2"});
  EXPECT_EQ(testing::wait_for(host("1", master, "2", "run", {"parallel.fsdp=2"})), 2);
  EXPECT_THAT(runs_.printed("host1"), ::testing::HasSubstr("does not match the 4 ranks"));
  EXPECT_NE(testing::wait_for(waiting), 0);
  EXPECT_THAT(runs_.printed("host0"), ::testing::HasSubstr("does not match the 4 ranks"));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(60));
}

TEST_F(LaunchersTest, TheOtherHostIsToldOfAKilledRank) {
  const Words endless = {"parallel.fsdp=2", "parallel.timeout_s=3600", "train.max_steps=100000"};
  for (const std::size_t killed : {0, 1}) {
    const std::string master = "127.0.0.1:" + port(), run = fmt::format("run{}", killed);
    const std::array<pid_t, 2> hosts = {host("0", master, "1", run, endless),
                                        host("1", master, "1", run, endless)};
    ASSERT_TRUE(testing::has_made(hosts[0], runs_.directory() / run / "metrics.jsonl"))
        << runs_.printed("host0");
    const std::vector<pid_t> ranks = testing::children_of(hosts[killed]);
    ASSERT_EQ(ranks.size(), 1u);
    kill(ranks[0], SIGKILL);
    EXPECT_EQ(testing::wait_for(hosts[killed]), 128 + SIGKILL);
    EXPECT_EQ(testing::wait_for(hosts[1 - killed]), 1);
    EXPECT_THAT(
        runs_.printed(fmt::format("host{}", 1 - killed)),
        ::testing::HasSubstr(fmt::format("rank {} failed: it was ended by signal 9", killed)));
  }
}

TEST_F(LaunchersTest, BenchTimesTheStepsOfSeveralRanks) {
  const pid_t launcher = testing::start_heddle({"launch",
                                                "--nproc",
                                                "2",
                                                "--log-dir",
                                                runs_.log_of("bench").string() + "s",
                                                "--",
                                                "bench",
                                                "step",
                                                "--json",
                                                "--preset",
                                                "small-2m",
                                                "--length",
                                                "64",
                                                "--steps",
                                                "1",
                                                "--warmup",
                                                "1",
                                                "--micro-batches",
                                                "2",
                                                "parallel.fsdp=2",
                                                "model.dtype=float32"},
                                               runs_.log_of("bench"));
  ASSERT_EQ(testing::wait_for(launcher), 0) << runs_.printed("bench");
  const std::string printed = runs_.printed("bench");
  const auto result = nlohmann::json::parse(printed.substr(printed.find('{')));
  EXPECT_EQ(result.at("tokens_per_step"), 2 * 2 * 64);
  EXPECT_NEAR(result.at("loss").at(0), std::log(4096.0), 1);
}

TEST_F(LaunchersTest, WhatRunsAsOneProcessSaysSo) {
  const auto message_of = [&](const Words& command) {
    Words words = {"launch", "--nproc", "2", "--log-dir", runs_.log_of("one").string() + "s", "--"};
    words.insert(words.end(), command.begin(), command.end());
    EXPECT_EQ(testing::wait_for(testing::start_heddle(words, runs_.log_of("one"))), 2);
    return runs_.printed("one");
  };
  EXPECT_THAT(message_of({"export", "model"}),
              ::testing::HasSubstr("'export' runs as one process; several ranks are for sft, pt, "
                                   "dpo, reward, rl, score, generate and bench"));
  EXPECT_THAT(
      message_of({"bench", "gdn"}),
      ::testing::HasSubstr("bench gdn: times one device; several ranks are for bench step"));
}

}  // namespace
}  // namespace heddle
