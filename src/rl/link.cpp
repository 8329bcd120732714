#include "rl/link.h"

#include <ATen/ops/empty.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "assembly/from_config.h"
#include "base/errors.h"
#include "base/random_hex.h"
#include "sync/invitation.h"

namespace heddle::rl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr comm::Seconds kPoll{0.001};  ///< Between two looks for a message.
constexpr comm::Seconds kSurvey{0.5};  ///< Between two looks for failures.
/// Members that speak for the trainers and for the rollouts.
constexpr std::int64_t kTrainer = 0, kRollout = 1;

/// One group, whose generation is its number among the two.
comm::StandaloneMeeting start(const config::SyncSection& options, const comm::World& world,
                              std::int64_t generation) {
  const comm::Store& store = world.job_store();
  const std::string key = fmt::format("rl/invitation/{}", generation);
  const comm::Seconds timeout(options.timeout_s);
  if (world.part() == assembly::kTrainers) {
    comm::Listener listener(
        comm::make_endpoint(world.address(), 0, "the address of the trainer's rank 0"));
    const sync::Invitation invitation{
        .endpoint = comm::make_endpoint(world.address(), listener.port(), "the listener"),
        .secret = random_hex(16),
        .generation = generation,
        .size = 1 + world.environment().world - world.size()};
    store.set(key, invitation.to_text());
    return comm::StandaloneMeeting::start(invitation.options(0, timeout), std::move(listener));
  }
  const auto text = store.wait(key, comm::Seconds(options.rendezvous_timeout_s));
  if (!text) {
    throw_error<CommError>(
        "rl: the trainer's rank 0 did not invite the rollouts within {:.3g} s "
        "(sync.rendezvous_timeout_s)",
        options.rendezvous_timeout_s);
  }
  return comm::StandaloneMeeting::start(
      sync::Invitation::from_text(*text).options(world.rank() + 1, timeout));
}

}  // namespace

sync::SyncOptions sync_options(const config::SyncSection& options, c10::Device device) {
  using Backend = config::SyncBackend;
  const auto require = [&](bool fits, const char* wanted) {
    if (fits) return;
    throw_error<ConfigError>(
        "sync.backend: {} carries the memory of {} devices, and the weights are on {}: expected "
        "auto or gloo",
        config::to_string(options.backend), wanted, device.str());
  };
  if (options.backend == Backend::kNccl) require(device.is_cuda(), "cuda");
  if (options.backend == Backend::kHccl) require(device.is_privateuseone(), "npu");
  return {.bucket_bytes = options.bucket_bytes,
          .staged = options.staged,
          .device = options.backend == Backend::kGloo ? c10::Device(c10::kCPU) : device};
}

std::string carrier_of(const sync::SyncOptions& options) {
  if (options.device.is_cpu()) return "gloo, through the memory of the hosts";
  return fmt::format("{}, from device to device", options.device.is_cuda() ? "nccl" : "hccl");
}

Channels meet(const config::SyncSection& options, const comm::World& world,
              const std::string& run) {
  // Both meetings are under way before either is awaited.
  comm::StandaloneMeeting messages = start(options, world, 0), weights = start(options, world, 1);
  Channels channels{sync::make_channel(messages.wait()), sync::make_channel(weights.wait())};
  for (const std::string& other : channels.messages->gather(run)) {
    if (other != run) {
      throw ConfigError(
          "rl: trainer and rollouts were started with different configurations or data: give all "
          "ranks of the job the same");
    }
  }
  return channels;
}

Link::Link(std::unique_ptr<sync::Channel> messages, const comm::World& world, comm::Seconds timeout)
    : messages_(std::move(messages)),
      world_(world),
      store_(world.job_store().reconnected()),
      timeout_(timeout),
      own_key_(fmt::format("rl/messages/{}", world.part())),
      pulse_seen_(Clock::now()),
      next_look_(Clock::now()) {
  const std::string other = is_trainer() ? assembly::kRollouts : assembly::kTrainers;
  other_key_ = fmt::format("rl/messages/{}", other);
  other_pulse_ = comm::pulse_key(other, 0);
}

void Link::send(const std::string& message) {
  const std::int64_t own = is_trainer() ? kTrainer : kRollout;
  if (messages_->rank() == own) store_.add(own_key_, 1);
  carry(message, own);
}

bool Link::is_announced() {
  look_for_failures();
  return store_.add(other_key_, 0) > received_;
}

std::string Link::receive() {
  ++received_;
  return carry({}, is_trainer() ? kRollout : kTrainer);
}

std::optional<std::string> Link::receive_within(comm::Seconds patience) {
  const auto deadline = Clock::now() + patience;
  while (!is_announced()) {
    if (Clock::now() > deadline) return std::nullopt;
    std::this_thread::sleep_for(kPoll);
  }
  return receive();
}

std::string Link::other_side() const {
  return fmt::format("rank {}, the first of the {}", is_trainer() ? world_.size() : 0,
                     is_trainer() ? assembly::kRollouts : assembly::kTrainers);
}

std::string Link::carry(std::string message, std::int64_t from) {
  try {
    return broadcast(std::move(message), from);
  } catch (const CommError& error) {
    // The trainer holds the group's store: when it is frozen, the group's own error names nobody.
    throw_error<CommError>("rl: a message of or to {}: {}", other_side(), error.what());
  }
}

std::string Link::broadcast(std::string message, std::int64_t from) {
  at::Tensor size = at::empty({1}, at::kLong);
  *size.mutable_data_ptr<std::int64_t>() = std::ssize(message);
  messages_->broadcast(size, from);
  at::Tensor bytes = at::empty({*size.const_data_ptr<std::int64_t>()}, at::kByte);
  if (messages_->rank() == from)
    std::memcpy(bytes.mutable_data_ptr<std::uint8_t>(), message.data(), message.size());
  if (bytes.numel() > 0) messages_->broadcast(bytes, from);
  const auto* begin = bytes.const_data_ptr<std::uint8_t>();
  return {begin, begin + bytes.numel()};
}

void Link::look_for_failures() {
  const auto now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + std::chrono::duration_cast<Clock::duration>(kSurvey);
  if (const auto failure = world_.failure_of_another()) throw CommError(*failure);
  const std::string pulse = store_.find(other_pulse_).value_or("");
  if (pulse != last_pulse_) {
    last_pulse_ = pulse;
    pulse_seen_ = now;
  } else if (now - pulse_seen_ > timeout_) {
    throw_error<CommError>("rl: {}, gave no sign of life for {:.3g} s (sync.timeout_s)",
                           other_side(), timeout_.count());
  }
}

}  // namespace heddle::rl
