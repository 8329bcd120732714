#include "cli/continuation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/launch_environment.h"

namespace heddle::cli {
namespace {

const std::vector<std::string> kCommand = {"sft", "run.yaml", "train.output_dir=a b"};

comm::LaunchEnvironment launched(const std::string& launcher, std::int64_t world,
                                 std::int64_t local_world) {
  comm::LaunchEnvironment launch;
  launch.launcher = launcher;
  launch.world = world;
  launch.local_world = local_world;
  launch.master = comm::make_endpoint("node1", 29500, "test");
  return launch;
}

TEST(Continuation, OfOneRankIsItsCommand) {
  EXPECT_EQ(continuation(kCommand, nullptr, ""),
            "continue with:\n  heddle sft run.yaml 'train.output_dir=a b'");
}

TEST(Continuation, GoesOnFromItsOwnCheckpoints) {
  EXPECT_EQ(
      continuation({"pt", "run.yaml", "train.resume=other/checkpoints/step-00000004"}, nullptr, ""),
      "continue with:\n  heddle pt run.yaml");
}

TEST(Continuation, OfALaunchOnOneHostNamesItsRanksAndItsLogs) {
  const auto launch = launched("heddle launch", 4, 4);
  EXPECT_EQ(continuation(kCommand, &launch, "heddle-logs/rank-0.log"),
            "continue with:\n  heddle launch --nproc 4 -- sft run.yaml 'train.output_dir=a b'");
  EXPECT_EQ(continuation(kCommand, &launch, "runs/logs/rank-0.log"),
            "continue with:\n  heddle launch --nproc 4 --log-dir runs/logs -- sft run.yaml "
            "'train.output_dir=a b'");
}

TEST(Continuation, OfALaunchOnSeveralHostsNamesThem) {
  auto launch = launched("heddle launch", 16, 8);
  launch.nonce = kNoJobId;
  EXPECT_EQ(
      continuation(kCommand, &launch, "heddle-logs/rank-0.log"),
      "continue with, on every host with its --node-rank:\n  heddle launch --nproc 8 --nnodes "
      "2 --node-rank 0 --master node1:29500 -- sft run.yaml 'train.output_dir=a b'");
  launch.nonce = "job 7";
  EXPECT_THAT(continuation(kCommand, &launch, "heddle-logs/rank-0.log"),
              ::testing::HasSubstr("--master node1:29500 --job-id 'job 7' -- sft"));
}

TEST(Continuation, OfAnotherLauncherIsItsUsers) {
  for (const char* launcher : {"torchrun", "Slurm"}) {
    const auto launch = launched(launcher, 4, 2);
    EXPECT_EQ(continuation(kCommand, &launch, ""),
              "continue by starting it with " + std::string(launcher) +
                  " in the same way: heddle sft run.yaml 'train.output_dir=a b'");
  }
}

}  // namespace
}  // namespace heddle::cli
