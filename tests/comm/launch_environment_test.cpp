#include "comm/launch_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "base/errors.h"

namespace heddle::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Variables = std::map<std::string, std::string>;

std::optional<LaunchEnvironment> read(const Variables& variables) {
  return read_launch_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

const Variables kTorchrun = {{"RANK", "3"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_PORT", "29501"},
                             {"MASTER_ADDR", "node1"}};

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

TEST(LaunchEnvironment, OutsideOfALauncherThereIsNone) {
  EXPECT_FALSE(read({}));
  EXPECT_FALSE(read({{"MASTER_ADDR", "node1"}, {"SLURM_JOB_ID", "5"}, {"SLURM_PROCID", "0"}}));
}

TEST(LaunchEnvironment, WorldSizeOneNeedsNothingElse) {
  const auto e = read({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  ASSERT_TRUE(e);
  EXPECT_EQ(e->world, 1);
}

TEST(LaunchEnvironment, ReadsTorchrun) {
  const auto e = read(
      with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "job"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}}));
  ASSERT_TRUE(e);
  EXPECT_EQ(e->launcher, "torchrun");
  EXPECT_EQ(e->rank, 3);
  EXPECT_EQ(e->world, 8);
  EXPECT_EQ(e->local_rank, 1);
  EXPECT_EQ(e->local_world, 2);
  EXPECT_EQ(e->master.to_string(), "node1:29501");
  EXPECT_EQ(e->nonce, "job/0");
  // The agent serves the store; without it rank 0 must.
  EXPECT_FALSE(read(with(kTorchrun, {{"RANK", "0"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}}))
                   ->serves_store);
  EXPECT_TRUE(read(with(kTorchrun, {{"RANK", "0"}}))->serves_store);
  EXPECT_FALSE(e->serves_store);
}

TEST(LaunchEnvironment, ReadsItsOwnLauncher) {
  const auto e = read(with(kTorchrun, {{kNonceVariable, "secret"}, {"RANK", "0"}}));
  EXPECT_EQ(e->launcher, "heddle launch");
  EXPECT_EQ(e->nonce, "secret");
  EXPECT_FALSE(e->serves_store);
}

TEST(LaunchEnvironment, ReadsSlurm) {
  const Variables slurm = {
      {"SLURM_PROCID", "5"},         {"SLURM_NTASKS", "16"},
      {"SLURM_LOCALID", "1"},        {"SLURM_STEP_ID", "0"},
      {"SLURM_JOB_ID", "77"},        {"SLURM_STEP_NODELIST", "node[007-010,20]"},
      {"SLURM_NTASKS_PER_NODE", "4"}};
  const auto e = read(slurm);
  ASSERT_TRUE(e);
  EXPECT_EQ(e->launcher, "Slurm");
  EXPECT_EQ(e->rank, 5);
  EXPECT_EQ(e->world, 16);
  EXPECT_EQ(e->local_rank, 1);
  EXPECT_EQ(e->master.host, "node007");
  EXPECT_EQ(e->master, read(with(slurm, {{"SLURM_PROCID", "0"}}))->master);
  EXPECT_NE(e->nonce, read(with(slurm, {{"SLURM_STEP_ID", "1"}}))->nonce);
  EXPECT_EQ(first_slurm_host("login1,node[1-3]"), "login1");
  EXPECT_EQ(first_slurm_host("rack[2,4]-x,b"), "rack2-x");
  EXPECT_EQ(first_slurm_host("rack[1-2]node[3-4],b[7-8]"), "rack1node3");
  for (const char* variable : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
    Variables broken = slurm;
    broken.erase("SLURM_STEP_NODELIST");
    broken[variable] = "node[1-2";
    EXPECT_THAT([&] { read(broken); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr(variable), HasSubstr("MASTER_ADDR"))));
  }
}

TEST(LaunchEnvironment, HalfOfOneIsRefused) {
  EXPECT_THAT(
      [] {
        read({{"RANK", "1"}});
      },
      ThrowsMessage<ConfigError>(HasSubstr("RANK is set and WORLD_SIZE is not")));
  EXPECT_THAT(
      [] {
        read({{"WORLD_SIZE", "2"}});
      },
      ThrowsMessage<ConfigError>(HasSubstr("WORLD_SIZE is set and RANK is not")));
  EXPECT_FALSE(read({{"WORLD_SIZE", "1"}}));
  // Where another launcher says it all, one of its names is somebody's export.
  EXPECT_TRUE(read({{"WORLD_SIZE", "2"},
                    {"SLURM_PROCID", "0"},
                    {"SLURM_NTASKS", "2"},
                    {"SLURM_STEP_ID", "0"},
                    {"SLURM_STEP_NODELIST", "node1"}}));
}

const Variables kSlurmStep = {{"SLURM_PROCID", "9"},  {"SLURM_NTASKS", "11"},
                              {"SLURM_LOCALID", "1"}, {"SLURM_STEP_ID", "0"},
                              {"SLURM_JOB_ID", "77"}, {"SLURM_STEP_NODELIST", "node[1-3]"},
                              {"SLURM_NODEID", "2"}};

TEST(LaunchEnvironment, ReadsHowManyRanksSlurmPutOnThisHost) {
  const auto local_world = [](const Variables& more) {
    return read(with(kSlurmStep, more))->local_world;
  };
  EXPECT_EQ(local_world({{"SLURM_TASKS_PER_NODE", "4(x2),3"}}), 3);
  EXPECT_EQ(local_world({{"SLURM_TASKS_PER_NODE", "4(x2),3"}, {"SLURM_NODEID", "1"}}), 4);
  // The step's tasks, which may be fewer than the job asked for, come first.
  EXPECT_EQ(local_world({{"SLURM_STEP_TASKS_PER_NODE", "5,4,2"},
                         {"SLURM_NTASKS_PER_NODE", "8"},
                         {"SLURM_TASKS_PER_NODE", "8(x3)"}}),
            2);
  EXPECT_EQ(local_world({{"SLURM_NTASKS_PER_NODE", "6"}, {"SLURM_TASKS_PER_NODE", "4(x3)"}}), 6);
  EXPECT_EQ(local_world({}), 1);
  Variables without_node = kSlurmStep;
  without_node.erase("SLURM_NODEID");
  EXPECT_EQ(read(with(without_node, {{"SLURM_TASKS_PER_NODE", "4(x2),4"}}))->local_world, 4);
  EXPECT_THAT(
      [&] {
        read(with(without_node, {{"SLURM_TASKS_PER_NODE", "4(x2),3"}}));
      },
      ThrowsMessage<ConfigError>(HasSubstr("SLURM_NODEID is not set")));
}

TEST(LaunchEnvironment, NamesAListOfRanksOfSlurmThatDoesNotFit) {
  for (const char* list : {"", "x", "4(x2", "4(x2)3", "4(2)", "4(x)", "4(x0)", "0(x3)", "4,,3",
                           "4(x2),", "-4(x3)", "99999999999999999999(x3)"}) {
    EXPECT_THAT(
        [&] {
          read(with(kSlurmStep, {{"SLURM_STEP_TASKS_PER_NODE", list}}));
        },
        ThrowsMessage<ConfigError>(
            HasSubstr("SLURM_STEP_TASKS_PER_NODE: '" + std::string(list) + "'")));
  }
  EXPECT_THAT(
      [] {
        read(with(kSlurmStep, {{"SLURM_TASKS_PER_NODE", "4(x2)"}}));
      },
      ThrowsMessage<ConfigError>(HasSubstr("is of 2 hosts, and SLURM_NODEID is 2")));
}

TEST(LaunchEnvironment, ReadsOpenMpiAndPmi) {
  const auto mpi = read({{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  ASSERT_TRUE(mpi);
  EXPECT_EQ(mpi->launcher, "OpenMPI");
  EXPECT_EQ(mpi->master.host, "127.0.0.1");
  const auto pmi = read({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"MASTER_ADDR", "10.0.0.9"}});
  ASSERT_TRUE(pmi);
  EXPECT_EQ(pmi->launcher, "PMI");
  EXPECT_EQ(pmi->master.host, "10.0.0.9");
  EXPECT_THAT(
      [] {
        read({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}});
      },
      ThrowsMessage<ConfigError>(HasSubstr("MASTER_ADDR is not set")));
}

TEST(LaunchEnvironment, NamesTheVariableThatDoesNotFit) {
  EXPECT_THAT(
      [] {
        read(with(kTorchrun, {{"RANK", "x"}}));
      },
      ThrowsMessage<ConfigError>(HasSubstr("RANK: 'x'")));
  EXPECT_THAT(
      [] {
        read(with(kTorchrun, {{"RANK", "8"}}));
      },
      ThrowsMessage<ConfigError>(HasSubstr("RANK=8 with WORLD_SIZE=8")));
  Variables no_port = kTorchrun;
  no_port.erase("MASTER_PORT");
  EXPECT_THAT([&] { read(no_port); }, ThrowsMessage<ConfigError>(HasSubstr("MASTER_PORT")));
}

}  // namespace
}  // namespace heddle::comm
