#include "rl/link.h"

#include <ATen/ops/empty.h>

#include <algorithm>
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

/// Throws CommError if another rank of the job says that it cannot go on.
void look_at(const comm::World& job) {
  if (const auto failure = failure_of_job(job)) throw CommError(*failure);
}

/// One group, whose number counts all that the job has made.
comm::StandaloneMeeting start(const config::SyncSection& options, const comm::World& job,
                              const Membership& rollouts, std::int64_t number) {
  const comm::Store& store = job.job_store();
  const std::string key = fmt::format("rl/invitation/{}", number);
  const comm::Seconds timeout(options.timeout_s);
  if (job.part() == assembly::kTrainers) {
    comm::Listener listener(
        comm::make_endpoint(job.address(), 0, "the address of the trainer's rank 0"));
    const sync::Invitation invitation{
        .endpoint = comm::make_endpoint(job.address(), listener.port(), "the listener"),
        .secret = random_hex(16),
        .generation = number,
        .size = 1 + std::ssize(rollouts.ranks)};
    store.set(key, invitation.to_text());
    return comm::StandaloneMeeting::start(invitation.options(0, timeout), std::move(listener));
  }
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           comm::Seconds(options.rendezvous_timeout_s));
  std::optional<std::string> text;
  while (!(text = store.wait(key, kSurvey)) && Clock::now() < deadline) look_at(job);
  if (!text) {
    throw_error<CommError>(
        "rl: the trainer's rank 0 did not invite the rollouts within {:.3g} s "
        "(sync.rendezvous_timeout_s)",
        options.rendezvous_timeout_s);
  }
  const auto place =
      std::ranges::find(rollouts.ranks, job.environment().rank) - rollouts.ranks.begin();
  return comm::StandaloneMeeting::start(
      sync::Invitation::from_text(*text).options(place + 1, timeout));
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

Channels meet(const config::SyncSection& options, const comm::World& job,
              const Membership& rollouts, const std::string& run) {
  // Both meetings are under way before either is awaited.
  const std::int64_t first = 2 * rollouts.generation;
  std::vector<comm::StandaloneMeeting> meetings;
  meetings.push_back(start(options, job, rollouts, first));
  meetings.push_back(start(options, job, rollouts, first + 1));
  std::vector<comm::Group> groups = sync::await_all(std::move(meetings), [&] { look_at(job); });
  Channels channels{sync::make_channel(std::move(groups[0])),
                    sync::make_channel(std::move(groups[1]))};
  for (const std::string& other : channels.messages->gather(run)) {
    if (other != run) {
      throw ConfigError(
          "rl: trainer and rollouts were started with different configurations or data: give all "
          "ranks of the job the same");
    }
  }
  return channels;
}

Link::Link(std::unique_ptr<sync::Channel> messages, const comm::World& job, std::int64_t generation,
           std::function<void()> look_for_failures)
    : messages_(std::move(messages)),
      store_(job.job_store().reconnected()),
      look_for_failures_(std::move(look_for_failures)),
      next_look_(Clock::now()) {
  const auto key_of = [&](const char* part) {
    return fmt::format("rl/messages/{}/{}", generation, part);
  };
  own_key_ = key_of(is_trainer() ? assembly::kTrainers : assembly::kRollouts);
  other_key_ = key_of(is_trainer() ? assembly::kRollouts : assembly::kTrainers);
}

void Link::send(const std::string& message) {
  const std::int64_t own = is_trainer() ? kTrainer : kRollout;
  if (messages_->rank() == own) store_.add(own_key_, 1);
  carry(message, own);
}

bool Link::is_announced() {
  if (const auto now = Clock::now(); now >= next_look_) {
    next_look_ = now + std::chrono::duration_cast<Clock::duration>(kSurvey);
    look_for_failures_();
  }
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

std::string Link::carry(std::string message, std::int64_t from) {
  try {
    return broadcast(std::move(message), from);
  } catch (const CommError& error) {
    // The trainer holds the group's store: when it is frozen, the group's own error names nobody.
    throw_error<CommError>("rl: a message of or to {}: {}",
                           is_trainer() ? "the rollouts" : "rank 0, the first of the trainers",
                           error.what());
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

}  // namespace heddle::rl
