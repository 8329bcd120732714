#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/world.h"
#include "config/run_config.h"
#include "rl/membership.h"
#include "sync/weight_sync.h"

namespace heddle::rl {

/// Both groups of trainer rank 0 and the rollout ranks: one for messages, one for weights.
struct Channels {
  std::unique_ptr<sync::Channel> messages, weights;
};

/// How weights travel between ranks with this device. Throws ConfigError where sync.backend does
/// not fit it.
sync::SyncOptions sync_options(const config::SyncSection& options, c10::Device device);
/// "nccl, from device to device", for people.
std::string carrier_of(const sync::SyncOptions& options);

/// Where the two parts meet, anew in each generation of the rollouts: trainer rank 0 listens and
/// leaves invitations in the store of the job, which the rollout ranks read. Trainer rank 0 is
/// member 0, the rollout at place r of `rollouts` member r + 1. `job`: the world of the trainers or
/// of all rollouts. Both sides have the same `run`, a text that follows from configuration and
/// data. Throws CommError, ConfigError where the runs differ.
Channels meet(const config::SyncSection& options, const comm::World& job,
              const Membership& rollouts, const std::string& run);

/// Messages between trainer rank 0 and all rollout ranks, one at a time in turn. A message is
/// announced in the store of the job before it travels, so that nobody waits in a collective for
/// the other side's work; while one waits, `look_for_failures` is called twice a second and ends
/// the wait with a CommError.
class Link {
 public:
  Link(std::unique_ptr<sync::Channel> messages, const comm::World& job, std::int64_t generation,
       std::function<void()> look_for_failures);

  void send(const std::string& message);
  /// Another message of the other side is announced. The rollouts' rank 0 asks.
  bool is_announced();
  /// The other side's message, which was announced.
  std::string receive();
  /// The next message if it is announced within `patience`.
  std::optional<std::string> receive_within(comm::Seconds patience);

 private:
  bool is_trainer() const { return messages_->rank() == 0; }
  /// Travels from a member to all others; a failure names the other side.
  std::string carry(std::string message, std::int64_t from);
  std::string broadcast(std::string message, std::int64_t from);

  std::unique_ptr<sync::Channel> messages_;
  comm::Store store_;
  std::function<void()> look_for_failures_;
  std::string own_key_, other_key_;
  std::int64_t received_ = 0;
  std::chrono::steady_clock::time_point next_look_;
};

}  // namespace heddle::rl
