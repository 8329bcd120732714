#include "sync/invitation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"

namespace heddle::sync {
namespace {

using ::testing::HasSubstr;

TEST(Invitation, KeepsEveryKindOfAddress) {
  for (const char* endpoint :
       {"127.0.0.1:4000", "node7:29500", "[::1]:29500", "[fe80::1%eth0]:29500"}) {
    Invitation invitation;
    invitation.endpoint = comm::parse_endpoint(endpoint, "test");
    invitation.secret = "a \"b\"";
    invitation.generation = 7;
    invitation.size = 5;
    const Invitation again = Invitation::from_text(invitation.to_text());
    EXPECT_EQ(again.endpoint, invitation.endpoint);
    EXPECT_EQ(again.endpoint.kind, invitation.endpoint.kind);
    EXPECT_EQ(again.secret, invitation.secret);
    EXPECT_EQ(again.options(3, comm::Seconds(1)).generation, 7);
    EXPECT_EQ(again.options(3, comm::Seconds(1)).size, 5);
  }
  for (const char* text : {"", "[]", "{}", R"({"endpoint": 5})", R"({"endpoint": "x"})"})
    EXPECT_THROW(Invitation::from_text(text), ConfigError) << text;
}

std::vector<comm::StandaloneMeeting> started(const std::string& other_secret, double timeout_s) {
  comm::Listener listener(std::uint16_t{0});
  Invitation invitation{listener.local_endpoint(), "right", 0, 2};
  std::vector<comm::StandaloneMeeting> meetings;
  const comm::Seconds timeout(timeout_s);
  meetings.push_back(
      comm::StandaloneMeeting::start(invitation.options(0, timeout), std::move(listener)));
  invitation.secret = other_secret;
  meetings.push_back(comm::StandaloneMeeting::start(invitation.options(1, timeout)));
  return meetings;
}

TEST(AwaitAll, GivesAllGroups) {
  const auto groups = await_all(started("right", 20), [] {});
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[1].rank(), 1);
}

TEST(AwaitAll, TellsTheFirstFailureBeforeTheDeadline) {
  try {
    await_all(started("wrong", 3600), [] {});
    FAIL() << "no error";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("another job"));
  }
}

TEST(AwaitAll, EndsWithAFailureElsewhere) {
  // Nobody else comes to this meeting.
  comm::Listener listener(comm::make_endpoint("127.0.0.1", 0, "loopback"));
  const Invitation invitation{
      .endpoint = comm::make_endpoint("127.0.0.1", listener.port(), "listener"), .secret = "alone"};
  std::vector<comm::StandaloneMeeting> meetings;
  meetings.push_back(comm::StandaloneMeeting::start(invitation.options(0, comm::Seconds(20)),
                                                    std::move(listener)));
  int looks = 0;
  try {
    await_all(std::move(meetings), [&] {
      if (++looks == 2) throw CommError("rank 3 failed: no such file");
    });
    FAIL() << "no error";
  } catch (const CommError& error) {
    EXPECT_STREQ(error.what(), "rank 3 failed: no such file");
  }
  // The meeting is still under way: its port is taken until its deadline.
  EXPECT_THROW(comm::Listener(invitation.endpoint), CommError);
}

}  // namespace
}  // namespace heddle::sync
