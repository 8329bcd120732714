// A user's view of a run of several ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "program.h"

namespace heddle::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Launched, WarnsOfIdleRanksOnceOnTheTerminalAndInTheLog) {
  const Folder folder;
  Arguments arguments = {"launch", "--nproc", "2", "--log-dir", folder.at("logs"), "--"};
  for (const std::string& word : folder.train({"parallel.dp=2", "train.global_batch_size=1"}))
    arguments.push_back(word);
  ASSERT_EQ(wait_for(start(folder, arguments)), 0) << message(folder);
  const std::string warning =
      "warning: train.global_batch_size 1 over dp x fsdp 2: 1 rank has no row in a step\n";
  EXPECT_THAT(message(folder), HasSubstr("\n" + warning));
  const std::string log = files::read(folder.at("logs/rank-0.log"));
  EXPECT_THAT(log, HasSubstr(warning));
  EXPECT_THAT(log, Not(HasSubstr("warning warning")));
}

}  // namespace
}  // namespace heddle::cli
