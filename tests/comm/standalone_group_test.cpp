#include "comm/standalone_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <functional>
#include <random>
#include <thread>

#include "base/errors.h"
#include "comm/store.h"

namespace heddle::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

StandaloneOptions side(const Endpoint& endpoint, std::int64_t rank, std::int64_t size = 2) {
  StandaloneOptions options;
  options.name = "weights";
  options.endpoint = endpoint;
  options.rank = rank;
  options.size = size;
  options.secret = "secret";
  options.timeout = Seconds(10);
  return options;
}

std::string outcome(StandaloneMeeting& meeting) {
  try {
    meeting.wait();
    return "";
  } catch (const CommError& error) {
    return error.what();
  }
}

TEST(StandaloneGroup, BothSidesStartBeforeEitherIsAwaited) {
  Listener listener(std::uint16_t{0});
  const Endpoint endpoint = listener.local_endpoint();
  auto sender = StandaloneMeeting::start(side(endpoint, 0), std::move(listener));
  auto receiver = StandaloneMeeting::start(side(endpoint, 1));
  const Group a = sender.wait(), b = receiver.wait();
  std::jthread other([&] { EXPECT_EQ(b.all_reduce_sum(2.0), 5); });
  EXPECT_EQ(a.all_reduce_sum(3.0), 5);
}

TEST(StandaloneGroup, WrongSidesAreNamed) {
  const auto meet = [](const std::function<void(StandaloneOptions&)>& spoil) {
    Listener listener(std::uint16_t{0});
    StandaloneOptions right = side(listener.local_endpoint(), 0),
                      wrong = side(listener.local_endpoint(), 1);
    right.timeout = wrong.timeout = Seconds(8);
    spoil(wrong);
    auto sender = StandaloneMeeting::start(right, std::move(listener));
    auto receiver = StandaloneMeeting::start(wrong);
    return outcome(receiver) + "; " + outcome(sender);
  };
  EXPECT_THAT(meet([](StandaloneOptions& wrong) { wrong.secret = "old"; }),
              AllOf(HasSubstr("another job, whose secret is another"),
                    HasSubstr("did not arrive: rank 1")));
  EXPECT_THAT(meet([](StandaloneOptions& wrong) { wrong.size = 3; }), HasSubstr("was told of"));
}

TEST(StandaloneGroup, WhoHasNotTheSecretReadsAndChangesNothing) {
  Listener listener(std::uint16_t{0});
  const Endpoint endpoint = listener.local_endpoint();
  auto sender = StandaloneMeeting::start(side(endpoint, 0), std::move(listener));
  for (const std::string other : {"", "secre", "secret ", "weights#0", "\n"}) {
    try {
      const Store store = Store::connect(endpoint, Seconds(5), other);
      store.set("job", "mine");
      ADD_FAILURE() << other;
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("whose secret is another")) << other;
    }
  }
  auto receiver = StandaloneMeeting::start(side(endpoint, 1));
  const Group a = sender.wait(), b = receiver.wait();
  std::jthread other([&] { EXPECT_EQ(b.all_reduce_sum(2.0), 5); });
  EXPECT_EQ(a.all_reduce_sum(3.0), 5);
}

TEST(StandaloneGroup, ANewGenerationRefusesTheOld) {
  Listener listener(std::uint16_t{0});
  const Endpoint endpoint = listener.local_endpoint();
  StandaloneOptions now = side(endpoint, 0), stale = side(endpoint, 1);
  now.generation = 2;
  now.timeout = Seconds(8);
  stale.generation = 1;
  auto sender = StandaloneMeeting::start(now, std::move(listener));
  auto receiver = StandaloneMeeting::start(stale);
  EXPECT_THAT(outcome(receiver), HasSubstr("another job ('weights#2')"));
  EXPECT_THAT(outcome(sender), HasSubstr("did not arrive: rank 1"));
}

TEST(StandaloneGroup, RanksAndListenersMustFit) {
  const Endpoint endpoint = make_endpoint("127.0.0.1", 1, "test");
  EXPECT_THROW(StandaloneMeeting::start(side(endpoint, 0)), ConfigError);
  EXPECT_THROW(StandaloneMeeting::start(side(endpoint, 2)), ConfigError);
  EXPECT_THROW(StandaloneMeeting::start(side(endpoint, 1), Listener(std::uint16_t{0})),
               ConfigError);
}

/// One rendezvous with one thing wrong, or none; each must end in success or a named error before
/// its deadline. Which error is a race where the deadline is short: c10d asks the resolver for the
/// name of every peer, and a slow one takes seconds. WrongSidesAreNamed says which it should be.
void meet_somehow(int kind, std::mt19937& random) {
  SCOPED_TRACE(kind);
  const auto pause = [&](int most) {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(std::uniform_int_distribution<int>(0, most)(random)));
  };
  Endpoint wanted = make_endpoint(kind == 5 ? "::1" : "127.0.0.1", 0, "test");
  Listener listener(wanted);
  wanted.port = listener.port();
  StandaloneOptions sender = side(wanted, 0), receiver = side(wanted, 1);
  sender.timeout = receiver.timeout = Seconds(kind == 3 || kind == 4 || kind == 6 ? 2 : 20);
  const auto begun = Clock::now();
  std::string sent, received;
  switch (kind) {
    case 0: {  // a late sender: the socket is there, nobody serves it yet
      auto r = StandaloneMeeting::start(receiver);
      pause(30);
      auto s = StandaloneMeeting::start(sender, std::move(listener));
      sent = outcome(s), received = outcome(r);
      EXPECT_EQ(sent + received, "");
      break;
    }
    case 1:    // a late receiver
    case 5: {  // over IPv6
      auto s = StandaloneMeeting::start(sender, std::move(listener));
      pause(30);
      auto r = StandaloneMeeting::start(receiver);
      sent = outcome(s), received = outcome(r);
      EXPECT_EQ(sent + received, "");
      break;
    }
    case 2:  // a squatter on the port
      EXPECT_THROW(Listener second(wanted), CommError);
      break;
    case 3:    // a stale process with an old secret
    case 6: {  // wrong sizes
      if (kind == 3) receiver.secret = "old";
      if (kind == 6) receiver.size = 3;
      auto s = StandaloneMeeting::start(sender, std::move(listener));
      auto r = StandaloneMeeting::start(receiver);
      sent = outcome(s), received = outcome(r);
      EXPECT_NE(sent, "");
      EXPECT_NE(received, "");
      break;
    }
    case 4: {  // a side that never comes: it threw before
      auto s = StandaloneMeeting::start(sender, std::move(listener));
      EXPECT_NE(outcome(s), "");
      break;
    }
  }
  EXPECT_LT(Clock::now() - begun, sender.timeout + Seconds(60));
}

TEST(StandaloneGroup, RendezvousOfEveryKind) {
  std::mt19937 random(5);
  for (int i = 0; i < 21; ++i) meet_somehow(i % 7, random);
}

TEST(SlowStandaloneGroup, AThousandRendezvous) {
  std::mt19937 random(6);
  for (int i = 0; i < 1000; ++i) meet_somehow(i % 7, random);
}

}  // namespace
}  // namespace heddle::comm
