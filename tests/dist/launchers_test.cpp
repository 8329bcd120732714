// The ranks of a job may be started by any launcher, and one rank needs none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "comm/listener.h"
#include "dist/launched_run.h"

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

  /// A port that was free a moment ago: what a scheduler would give.
  static std::string port() { return std::to_string(comm::Listener(std::uint16_t{0}).port()); }

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
  for (const char* node : {"1", "0"}) {
    Words words = {"launch",
                   "--nproc",
                   "1",
                   "--nnodes",
                   "2",
                   "--node-rank",
                   node,
                   "--master",
                   master,
                   "--log-dir",
                   (runs_.directory() / "logs").string(),
                   "--"};
    Words more = kShort;
    more.push_back("parallel.fsdp=2");
    for (const std::string& word : runs_.command("run", 0, "dense", more)) words.push_back(word);
    hosts.push_back(testing::start_heddle(words, runs_.log_of(std::string("host") + node)));
  }
  for (const pid_t host : hosts) EXPECT_EQ(testing::wait_for(host), 0);
  EXPECT_NEAR(runs_.metrics("run").at(1).loss, runs_.metrics("alone").at(1).loss, 1e-8);
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
  EXPECT_THAT(message_of({"generate", "model"}),
              ::testing::HasSubstr("'generate' runs as one process"));
  EXPECT_THAT(
      message_of({"bench", "gdn"}),
      ::testing::HasSubstr("bench gdn: times one device; several ranks are for bench step"));
}

}  // namespace
}  // namespace heddle
