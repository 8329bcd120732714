#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "comm/world.h"
#include "config/run_config.h"
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

/// Where the two parts meet: trainer rank 0 listens and leaves invitations in the store of the job,
/// which the rollout ranks read. Trainer rank 0 is member 0, rollout rank r member r + 1. Both
/// sides have the same `run`, a text that follows from configuration and data. Throws CommError,
/// ConfigError where the runs differ.
Channels meet(const config::SyncSection& options, const comm::World& world, const std::string& run);

/// Messages between trainer rank 0 and all rollout ranks, one at a time in turn. A message is
/// announced in the store of the job before it travels, so that nobody waits in a collective for
/// the other side's work; while one waits, a failure of another rank, or no sign of life from the
/// other side for sync.timeout_s, ends the wait with a CommError.
class Link {
 public:
  Link(std::unique_ptr<sync::Channel> messages, const comm::World& world, comm::Seconds timeout);

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
  /// Its first rank by its number in the job, for errors.
  std::string other_side() const;
  void look_for_failures();

  std::unique_ptr<sync::Channel> messages_;
  const comm::World& world_;
  comm::Store store_;
  comm::Seconds timeout_;
  std::string own_key_, other_key_, other_pulse_;
  std::int64_t received_ = 0;
  std::string last_pulse_;
  std::chrono::steady_clock::time_point pulse_seen_, next_look_;
};

}  // namespace heddle::rl
