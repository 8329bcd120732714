#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <thread>

#include "base/errors.h"
#include "comm/ranks.h"
#include "comm/refusal.h"
#include "comm/world.h"

namespace heddle::comm {
namespace {

using heddle::testing::environments;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// A store that a launcher would serve.
struct Served {
  explicit Served(const std::string& nonce = "test") {
    store.below(kStorePrefix).set(kJobKey, nonce);
  }
  Listener listener{std::uint16_t{0}};
  Endpoint master = listener.local_endpoint();
  Store store = Store::serve(std::move(listener), Seconds(10));
};

std::string join_error(const LaunchEnvironment& environment, double timeout_s) {
  try {
    World::join(environment, Seconds(timeout_s))->leave();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(Rendezvous, RankZeroMayServe) {
  Listener listener(std::uint16_t{0});
  const std::uint16_t port = listener.port();
  ::close(listener.release());
  auto all = environments(2, make_endpoint("127.0.0.1", port, "test"));
  all[0].serves_store = all[0].announces_job = true;
  std::string late;
  // The client comes first and must try again until the server listens.
  std::jthread client([&] { late = join_error(all[1], 20); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(join_error(all[0], 20), "");
  client.join();
  EXPECT_EQ(late, "");
}

TEST(Rendezvous, NamesWhoIsMissing) {
  const Served served;
  EXPECT_THAT(
      join_error(environments(3, served.master)[1], 1),
      AllOf(HasSubstr("rank 1 waited 1 s (parallel.timeout_s)"), HasSubstr("rank 0, rank 2")));
  const Served soon;
  EXPECT_THAT(join_error(environments(2, soon.master)[1], 0.05), HasSubstr("waited 0.05 s"));
}

TEST(Rendezvous, RefusesAStaleProcess) {
  const Served served("new");
  std::string first;
  std::jthread good([&] { first = join_error(environments(2, served.master, "new")[0], 3); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_THAT(join_error(environments(2, served.master, "old")[1], 3),
              AllOf(HasSubstr("another job ('new')"), HasSubstr("'old'")));
  good.join();
  EXPECT_THAT(first, HasSubstr("did not arrive: rank 1"));
}

TEST(Rendezvous, RefusesTwoProcessesOfOneRank) {
  const Served served;
  std::string first;
  std::jthread other([&] { first = join_error(environments(2, served.master)[1], 2); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_THAT(join_error(environments(2, served.master)[1], 2),
              HasSubstr("two processes say that they are rank 1"));
}

TEST(Rendezvous, RefusesWrongSizes) {
  const Served served;
  std::string first;
  const auto begun = std::chrono::steady_clock::now();
  std::jthread other([&] { first = join_error(environments(2, served.master)[0], 60); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_THAT(join_error(environments(3, served.master)[1], 60),
              HasSubstr("rank 1 was told of 3 ranks, another one of 2"));
  other.join();
  // Whoever waits for it is told at once.
  EXPECT_THAT(first, AllOf(HasSubstr("rank 1 failed"), HasSubstr("was told of 3 ranks")));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(20));
}

TEST(Rendezvous, ARankThatWillNotComeLeavesItsReason) {
  const Served served;
  std::string first;
  const auto begun = std::chrono::steady_clock::now();
  std::jthread other([&] { first = join_error(environments(2, served.master)[0], 60); });
  // Not for the ranks of another job.
  refuse_to_join(environments(2, served.master, "stranger")[1], "a stranger's reason");
  refuse_to_join(environments(2, served.master)[1], "run.yaml:3: unknown key\nand more");
  other.join();
  EXPECT_EQ(first, "rank 1 failed: run.yaml:3: unknown key");
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(20));
}

TEST(Rendezvous, SaysThatNothingListens) {
  ::testing::internal::CaptureStderr();
  Listener gone(std::uint16_t{0});
  const Endpoint master = gone.local_endpoint();
  ::close(gone.release());
  EXPECT_THAT(join_error(environments(2, master)[1], 0.05),
              AllOf(HasSubstr(master.to_string()), HasSubstr("nothing listens there"),
                    HasSubstr("0.05 s (parallel.timeout_s)")));
  // A name in the domain that never has one, of ranks on two hosts: those of one take its loopback.
  auto afar = environments(2, make_endpoint("nosuchhost.invalid", 29500, ""))[1];
  afar.local_rank = 0, afar.local_world = 1;
  EXPECT_THAT(join_error(afar, 1), HasSubstr("cannot resolve 'nosuchhost.invalid'"));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(Rendezvous, ASquatterIsNoStore) {
  // Something listens and never answers.
  const Listener squatter(std::uint16_t{0});
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(join_error(environments(2, squatter.local_endpoint())[1], 2),
              HasSubstr(squatter.local_endpoint().to_string()));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8));
  auto serving = environments(2, squatter.local_endpoint())[0];
  serving.serves_store = serving.announces_job = true;
  EXPECT_THAT(join_error(serving, 2), HasSubstr("another job or program holds the port"));
}

TEST(Rendezvous, WorksOverIpv6) {
  Endpoint loopback = make_endpoint("::1", 0, "test");
  Listener listener(loopback);
  loopback.port = listener.port();
  const Store store = Store::serve(std::move(listener), Seconds(10));
  auto all = environments(2, loopback);
  all[0].announces_job = true;
  std::string other;
  std::jthread thread([&] { other = join_error(all[1], 10); });
  EXPECT_EQ(join_error(all[0], 10), "");
  thread.join();
  EXPECT_EQ(other, "");
}

}  // namespace
}  // namespace heddle::comm
