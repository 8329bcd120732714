#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <thread>

#include "base/errors.h"
#include "comm/ranks.h"
#include "comm/refusal.h"
#include "comm/world.h"
#include "testing/free_port.h"

namespace heddle::comm {
namespace {

using heddle::testing::environments;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// A deadline that no test waits for.
constexpr double kNever = 3600;

/// A store that a launcher would serve.
struct Served {
  explicit Served(const std::string& nonce = "test") {
    store.below(kStorePrefix).set(kJobKey, nonce);
  }
  void await_arrival(int rank) const {
    EXPECT_TRUE(
        store.below(kStorePrefix).wait("arrived/" + std::to_string(rank), Seconds(60)).has_value());
  }
  Listener listener{std::uint16_t{0}};
  Endpoint master = listener.local_endpoint();
  Store store = Store::serve(std::move(listener), Seconds(10));
};

/// A port on which nothing listens, and which nobody else gets.
class TakenPort {
 public:
  TakenPort() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
  }
  ~TakenPort() { close(socket_); }
  TakenPort(const TakenPort&) = delete;
  TakenPort& operator=(const TakenPort&) = delete;
  std::uint16_t port() const { return port_; }

 private:
  int socket_;
  std::uint16_t port_ = 0;
};

std::string join_error(const LaunchEnvironment& environment, double timeout_s) {
  try {
    World::join(environment, Seconds(timeout_s))->leave();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// Environments where no launcher serves the store.
std::vector<LaunchEnvironment> two_ranks_of_which_0_serves() {
  auto all = environments(2, make_endpoint("127.0.0.1", testing::free_port(), "test"));
  all[0].serves_store = all[0].announces_job = true;
  return all;
}

TEST(Rendezvous, RankZeroMayServe) {
  const auto all = two_ranks_of_which_0_serves();
  std::string late;
  // The client comes first and must try again until the server listens.
  std::jthread client([&] { late = join_error(all[1], 20); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(join_error(all[0], 20), "");
  client.join();
  EXPECT_EQ(late, "");
}

TEST(Rendezvous, TheServerOfTheStoreGoesWhenAllKnowOfItsFailure) {
  const auto all = two_ranks_of_which_0_serves();
  std::promise<void> gone;
  std::string found;
  std::jthread slow([&] {
    try {
      const auto world = World::join(all[1], Seconds(kNever));
      // Longer than a rank needs between two looks at the store.
      gone.get_future().wait_for(std::chrono::seconds(2));
      found = world->failure_of_another().value_or("nothing");
      world->fail("rank 0 said why");
    } catch (const std::exception& error) {
      found = error.what();
    }
  });
  World::join(all[0], Seconds(kNever))->fail("the disk is full");
  gone.set_value();
  slow.join();
  EXPECT_EQ(found, "rank 0 failed: the disk is full");
}

TEST(Rendezvous, AJobIsEmptyWhenEachOfItsRanksIsCountedOut) {
  const Served served;
  const Store job = served.store.below(kStorePrefix);
  const auto all = environments(3, served.master);
  count_out(job, all[0]);
  // Its launcher may speak for it as well.
  count_out(job, all[0]);
  count_out(job, all[1]);
  EXPECT_FALSE(job.find(kEmptyKey));
  // A launcher speaks for all ranks of its host.
  count_out(job, all[1], 2);
  EXPECT_TRUE(job.find(kEmptyKey));
}

TEST(Rendezvous, ARefusalIsReadByThoseThatComeLate) {
  const auto all = two_ranks_of_which_0_serves();
  std::promise<void> gone;
  std::string found;
  std::jthread late([&] {
    gone.get_future().wait_for(std::chrono::seconds(2));
    found = join_error(all[1], kNever);
  });
  refuse_to_join(all[0], "data.train: no such file");
  gone.set_value();
  late.join();
  EXPECT_EQ(found, "rank 0 failed: data.train: no such file");
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
  served.await_arrival(0);
  EXPECT_THAT(join_error(environments(2, served.master, "old")[1], kNever),
              AllOf(HasSubstr("another job ('new')"), HasSubstr("'old'")));
  good.join();
  EXPECT_THAT(first, HasSubstr("did not arrive: rank 1"));
}

TEST(Rendezvous, RefusesTwoProcessesOfOneRank) {
  const Served served;
  std::string first;
  std::jthread other([&] { first = join_error(environments(2, served.master)[1], kNever); });
  served.await_arrival(1);
  EXPECT_THAT(join_error(environments(2, served.master)[1], kNever),
              HasSubstr("two processes say that they are rank 1"));
}

TEST(Rendezvous, RefusesWrongSizes) {
  const Served served;
  std::string first;
  std::jthread other([&] { first = join_error(environments(2, served.master)[0], kNever); });
  served.await_arrival(0);
  EXPECT_THAT(join_error(environments(3, served.master)[1], kNever),
              HasSubstr("rank 1 was told of 3 ranks, another one of 2"));
  other.join();
  // Whoever waits for it is told at once.
  EXPECT_THAT(first, AllOf(HasSubstr("rank 1 failed"), HasSubstr("was told of 3 ranks")));
}

TEST(Rendezvous, ARankThatWillNotComeLeavesItsReason) {
  const Served served;
  std::string first;
  std::jthread other([&] { first = join_error(environments(2, served.master)[0], kNever); });
  // Not for the ranks of another job.
  refuse_to_join(environments(2, served.master, "stranger")[1], "a stranger's reason");
  refuse_to_join(environments(2, served.master)[1], "run.yaml:3: unknown key\nand more");
  other.join();
  EXPECT_EQ(first, "rank 1 failed: run.yaml:3: unknown key");
}

TEST(Rendezvous, SaysThatNothingListens) {
  ::testing::internal::CaptureStderr();
  const TakenPort silent;
  const Endpoint master = make_endpoint("127.0.0.1", silent.port(), "test");
  EXPECT_THAT(join_error(environments(2, master)[1], 0.05),
              AllOf(HasSubstr(master.to_string()), HasSubstr("nothing listens there"),
                    HasSubstr("0.05 s (parallel.timeout_s)")));
  // A name in the domain that never has one, of ranks on two hosts: those of one take its loopback.
  auto afar = environments(2, make_endpoint("nosuchhost.invalid", 29500, ""))[1];
  afar.local_rank = 0, afar.local_world = 1;
  EXPECT_THAT(join_error(afar, 10), HasSubstr("cannot resolve 'nosuchhost.invalid'"));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(Rendezvous, ASquatterIsNoStore) {
  // Something listens and never answers.
  const Listener squatter(std::uint16_t{0});
  EXPECT_THAT(join_error(environments(2, squatter.local_endpoint())[1], 2),
              HasSubstr(squatter.local_endpoint().to_string()));
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
