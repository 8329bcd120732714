// The trainers' side of the meeting of two jobs.
#include "rl/reception.h"

#include <future>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "rl/rl_fixture.h"

namespace heddle {
namespace {

constexpr comm::Seconds kNever{3600};

class ReceptionTest : public RlTest {
 protected:
  void SetUp() override {
    RlTest::SetUp();
    config_ = run("run", {"sync.listen=127.0.0.1:0", "sync.rendezvous_timeout_s=3600"});
    reception_ = std::make_unique<rl::Reception>(config_, nullptr, rl::Facts());
  }
  /// The connection of a rollout job of its own.
  comm::Store store() const {
    const rl::Place place = rl::read_place(rl::rendezvous_file(config_)).value();
    return comm::Store::connect(place.endpoint, kNever, place.secret).below(comm::kStorePrefix);
  }
  static void arrive(const comm::Store& store, std::int64_t number) {
    ASSERT_EQ(store.add(rl::kArrivedKey, 1), number);
    store.set(rl::job_key(number), nlohmann::json{{"ranks", 1}, {"facts", rl::Facts()}}.dump());
  }

  config::RunConfig config_;
  std::unique_ptr<rl::Reception> reception_;
};

TEST_F(ReceptionTest, AJobThatAnswersLateIsToldAndComesAnew) {
  std::future<rl::Guest> guest =
      std::async(std::launch::async, [&] { return reception_->await(""); });
  const comm::Store late = store();
  arrive(late, 1);
  EXPECT_TRUE(late.wait(rl::called_key(1), kNever));
  EXPECT_TRUE(late.wait(rl::passed_key(1), kNever));
  // Nobody reads it any more.
  late.set(rl::here_key(1), "1");
  arrive(late, 2);
  EXPECT_TRUE(late.wait(rl::called_key(2), kNever));
  late.set(rl::here_key(2), "1");
  EXPECT_EQ(guest.get().number, 2);
}

TEST_F(ReceptionTest, TheTrainerGoesWhenThoseThatWaitHaveReadThatItIsOver) {
  const comm::Store waiting = store();
  arrive(waiting, 1);
  std::promise<void> gone;
  std::future<bool> has_read = std::async(std::launch::async, [&] {
    // Longer than a job needs between two looks at the store.
    gone.get_future().wait_for(std::chrono::seconds(2));
    const bool is_over = waiting.find(rl::kNoMoreKey).has_value();
    waiting.set(rl::gone_key(1), "1");
    return is_over;
  });
  reception_.reset();
  gone.set_value();
  EXPECT_TRUE(has_read.get());
}

}  // namespace
}  // namespace heddle
