#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/standalone_group.h"
#include "sync/channel.h"

namespace heddle::sync::testing {

/// The group of one sender and `rollouts` others. Each member meets in its own thread or process.
class MeetingPlace {
 public:
  explicit MeetingPlace(std::int64_t rollouts, double timeout_s = 30, std::int64_t generation = 0)
      : listener_(std::uint16_t{0}) {
    options_.name = "weights";
    options_.endpoint = listener_.local_endpoint();
    options_.size = rollouts + 1;
    options_.secret = "test";
    options_.generation = generation;
    options_.timeout = comm::Seconds(timeout_s);
  }
  std::unique_ptr<Channel> sender() {
    return make_channel(comm::StandaloneMeeting::start(options_, std::move(listener_)).wait());
  }
  /// `number` from 0.
  std::unique_ptr<Channel> rollout(std::int64_t number) const {
    comm::StandaloneOptions options = options_;
    options.rank = number + 1;
    return make_channel(comm::StandaloneMeeting::start(options).wait());
  }
  const comm::StandaloneOptions& options() const { return options_; }

 private:
  comm::Listener listener_;
  comm::StandaloneOptions options_;
};

/// Runs the sender and the rollouts in threads; returns what each threw, the sender's first.
inline std::vector<std::string> run_sides(
    std::int64_t rollouts, const std::function<void(std::unique_ptr<Channel>)>& sender,
    const std::function<void(std::unique_ptr<Channel>, std::int64_t)>& rollout,
    double timeout_s = 30) {
  MeetingPlace place(rollouts, timeout_s);
  std::vector<std::string> errors(static_cast<std::size_t>(rollouts) + 1);
  const auto guarded = [&](std::size_t who, const std::function<void()>& work) {
    try {
      work();
    } catch (const std::exception& error) {
      errors[who] = error.what();
    }
  };
  std::vector<std::jthread> threads;
  threads.emplace_back([&] { guarded(0, [&] { sender(place.sender()); }); });
  for (std::int64_t number = 0; number < rollouts; ++number) {
    threads.emplace_back([&, number] {
      guarded(static_cast<std::size_t>(number) + 1,
              [&] { rollout(place.rollout(number), number); });
    });
  }
  threads.clear();
  return errors;
}

}  // namespace heddle::sync::testing
