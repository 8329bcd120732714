#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

#include "base/errors.h"
#include "base/files.h"
#include "sync/invitation.h"
#include "sync/weight_sync.h"
#include "testing/paths.h"
#include "testing/process.h"
#include "testing/temporary_directory.h"
#include "weights.h"

namespace heddle::sync {
namespace {

using ::testing::HasSubstr;

pid_t start_rollout(const std::filesystem::path& folder, const std::string& rank) {
  const std::string program = heddle::testing::built_path("tests/sync/heddle_sync_rollout");
  const pid_t child = ::fork();
  if (child == 0) {
    ::execl(program.c_str(), program.c_str(), folder.c_str(), rank.c_str(), nullptr);
    ::_exit(127);
  }
  return child;
}

std::unique_ptr<Channel> meet(const std::filesystem::path& folder, std::int64_t generation,
                              std::int64_t size) {
  comm::Listener listener(std::uint16_t{0});
  const Invitation invitation{listener.local_endpoint(), "test", generation, size};
  auto meeting =
      comm::StandaloneMeeting::start(invitation.options(0, comm::Seconds(6)), std::move(listener));
  files::write_atomically(folder / ("invitation." + std::to_string(generation)),
                          invitation.to_text());
  return make_channel(meeting.wait());
}

void expect_received(const std::filesystem::path& folder, const std::string& rank,
                     const std::string& version) {
  const auto path = folder / ("received." + rank);
  const auto read = [&] { return std::filesystem::exists(path) ? files::read(path) : ""; };
  for (int k = 0; k < 3000 && read() != version; ++k)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(read(), version) << "rollout " << rank;
}

TEST(SyncProcesses, GoOnWithoutARolloutThatStopsMidway) {
  const heddle::testing::TemporaryDirectory folder;
  const pid_t first = start_rollout(folder.path(), "1"), second = start_rollout(folder.path(), "2");
  // What follows has little time.
  ASSERT_TRUE(heddle::testing::has_made(first, folder / "ready.1"));
  ASSERT_TRUE(heddle::testing::has_made(second, folder / "ready.2"));
  const testing::Weights weights;
  Publisher publisher(comm::Group("trainers"), weights.parts(), {4096, false});
  publisher.connect(meet(folder.path(), 0, 3), 0);
  weights.fill(1);
  publisher.publish(1);
  expect_received(folder.path(), "1", "1");
  expect_received(folder.path(), "2", "1");

  ::kill(second, SIGSTOP);
  weights.fill(2);
  try {
    publisher.publish(2);
    FAIL() << "published to a stopped process";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 2"));
  }
  ::kill(second, SIGKILL);
  ::waitpid(second, nullptr, 0);

  publisher.connect(meet(folder.path(), 1, 2), 1);
  weights.fill(3);
  publisher.publish(3);
  expect_received(folder.path(), "1", "3");
  int status = 0;
  ::waitpid(first, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace heddle::sync
