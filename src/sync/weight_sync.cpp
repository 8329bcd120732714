#include "sync/weight_sync.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <span>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "sync/bucket.h"
#include "sync/checksum.h"

namespace heddle::sync {
namespace {

using Clock = std::chrono::steady_clock;

/// Hash of the weights whose buckets have these checksums.
std::uint64_t hash_of(const at::Tensor& sums) {
  const at::Tensor here = sums.cpu();
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(here.const_data_ptr<std::int64_t>());
  return checksum(std::span(bytes, here.nbytes()), 0);
}

at::Tensor a_word_for_each_bucket(const Manifest& manifest, c10::Device device) {
  return at::zeros({std::ssize(manifest.buckets())}, at::TensorOptions(device).dtype(at::kLong));
}

/// Words of a queue of two buckets: while one is on the wire the other is packed or written.
struct Pair {
  std::array<at::Tensor, 2> memory;
  std::array<comm::Pending, 2> pending;
};

/// All members say which buckets they got damaged ([buckets], not 0); returns those that anybody
/// did. Waits for the device.
std::vector<std::int64_t> damaged_anywhere(Channel& channel, const at::Tensor& damaged_here) {
  at::Tensor counts = damaged_here.cpu().clone();
  channel.sum(counts);
  const auto* count = counts.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> damaged;
  for (std::int64_t k = 0; k < counts.numel(); ++k) {
    if (count[k] > 0) damaged.push_back(k);
  }
  return damaged;
}

std::vector<std::int64_t> all_buckets(const Manifest& manifest) {
  std::vector<std::int64_t> all(manifest.buckets().size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

/// The sender's manifest must be everybody's.
void compare(Channel& channel, const Manifest& manifest) {
  const std::string own = manifest.text();
  const auto hashes = channel.gather(fmt::format("{:016x}", manifest.hash()));
  const bool is_same = std::all_of(hashes.begin(), hashes.end(),
                                   [&](const std::string& hash) { return hash == hashes[0]; });
  if (is_same) return;
  const auto texts = channel.gather(own);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank] == own) continue;
    throw_error<ModelError>("weight sync: rank {} and rank {} do not have the same tensors: {}",
                            channel.rank(), rank, first_difference(own, texts[rank]));
  }
}

/// Warms a new channel up and compares the manifests over it. One that fails is given up: what it
/// left on the device would keep the next one from starting.
std::unique_ptr<Channel> opened(std::unique_ptr<Channel> channel, std::int64_t generation,
                                c10::Device device, const Manifest& manifest) {
  try {
    warm_up(*channel, generation, device);
    compare(*channel, manifest);
  } catch (...) {
    channel->give_up();
    throw;
  }
  return channel;
}

constexpr std::int64_t kHeader = 3;  ///< Version, buckets, hash of the manifest.

[[noreturn]] void fail_damaged(std::int64_t version, const Manifest& manifest,
                               const std::vector<std::int64_t>& damaged) {
  const Rows& rows = manifest.buckets()[static_cast<std::size_t>(damaged[0])].rows[0];
  throw_error<CommError>(
      "weight sync: version {} is not published: {} buckets arrived damaged twice, the first holds "
      "{}",
      version, damaged.size(), manifest.tensors()[rows.tensor].name);
}

}  // namespace

Publisher::Publisher(comm::Group trainers, std::vector<Part> parts, SyncOptions options)
    : gather_(std::move(trainers), std::move(parts), options.bucket_bytes, options.device),
      device_(options.device),
      sums_(a_word_for_each_bucket(manifest(), options.device)) {}

void Publisher::connect(std::unique_ptr<Channel> channel, std::int64_t generation) {
  channel_ = opened(std::move(channel), generation, device_, manifest());
}

void Publisher::disconnect() {
  if (channel_) channel_->give_up();
  channel_.reset();
}

/// Collective over the trainers. Collects into one buffer while the other is on the wire; goes on
/// collecting after the channel has failed, because the other trainer ranks do.
std::vector<std::int64_t> Publisher::send(const std::vector<std::int64_t>& buckets,
                                          std::int64_t version, std::string& failure) {
  Pair pair;
  const auto guarded = [&](const auto& work) {
    if (!is_sender() || !failure.empty()) return;
    try {
      work();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  };
  for (std::size_t k = 0; k < buckets.size(); ++k) {
    const std::int64_t number = buckets[k];
    at::Tensor& memory = pair.memory[k % 2];
    at::Tensor wire, bytes;
    if (is_sender()) {
      if (!memory.defined()) memory = bucket_memory(manifest(), device_);
      wire = on_wire(memory, manifest(), number);
      bytes = payload(wire);
    }
    guarded([&] { pair.pending[k % 2].wait(); });
    gather_.collect(static_cast<std::size_t>(number), bytes);
    guarded([&] {
      sums_.select(0, number).copy_(seal(wire, version, number));
      pair.pending[k % 2] = channel_->start_broadcast(wire, 0);
    });
  }
  for (comm::Pending& pending : pair.pending) guarded([&] { pending.wait(); });
  std::vector<std::int64_t> damaged;
  guarded(
      [&] { damaged = damaged_anywhere(*channel_, a_word_for_each_bucket(manifest(), at::kCPU)); });
  return damaged;
}

std::uint64_t Publisher::weights_hash() {
  at::Tensor wire, bytes, memory;
  if (is_sender()) memory = bucket_memory(manifest(), device_);
  for (const std::int64_t number : all_buckets(manifest())) {
    if (is_sender()) {
      wire = on_wire(memory, manifest(), number);
      bytes = payload(wire);
    }
    gather_.collect(static_cast<std::size_t>(number), bytes);
    if (is_sender()) sums_.select(0, number).copy_(inspect(wire, 0, number).sum);
  }
  return is_sender() ? hash_of(sums_) : 0;
}

void Publisher::tell_trainers(const std::string& failure) const {
  const auto failures = gather_.trainers().all_gather_objects(failure);
  if (!failures[0].empty()) throw_error<CommError>("{}", failures[0]);
}

SyncReport Publisher::publish(std::int64_t version) {
  const auto begin = Clock::now();
  const auto count = static_cast<std::int64_t>(manifest().buckets().size());
  std::string failure;
  if (is_sender() && !channel_) failure = "weight sync: no rollout is connected";
  const auto guarded = [&](const auto& work) {
    if (!is_sender() || !failure.empty()) return;
    try {
      work();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  };
  guarded([&] {
    at::Tensor header =
        at::tensor({version, count, static_cast<std::int64_t>(manifest().hash())}, at::kLong);
    channel_->broadcast(header, 0);
  });
  std::vector<std::int64_t> damaged = send(all_buckets(manifest()), version, failure);
  // The other trainer ranks collect again what is sent again.
  at::Tensor again = at::zeros({count + 1}, at::kLong);
  for (const std::int64_t bucket : damaged) again.mutable_data_ptr<std::int64_t>()[bucket] = 1;
  gather_.trainers().broadcast(again, 0);
  damaged.clear();
  for (std::int64_t k = 0; k < count; ++k) {
    if (again.const_data_ptr<std::int64_t>()[k] > 0) damaged.push_back(k);
  }
  if (!damaged.empty()) {
    log::warning("weight sync: version {}: {} buckets arrived damaged and are sent again", version,
                 damaged.size());
    const auto still = send(damaged, version, failure);
    guarded([&] {
      if (!still.empty()) fail_damaged(version, manifest(), still);
    });
  }
  guarded([&] {
    at::Tensor word = at::tensor({version}, at::kLong);
    channel_->broadcast(word, 0);
  });
  // A group whose collective failed is never used again.
  if (is_sender() && !failure.empty()) disconnect();
  tell_trainers(failure);
  return {manifest().bytes(), count, static_cast<std::int64_t>(damaged.size()),
          std::chrono::duration<double>(Clock::now() - begin).count(),
          is_sender() ? hash_of(sums_) : 0};
}

Subscriber::Subscriber(std::vector<Part> parts, SyncOptions options)
    : scatter_(std::move(parts)),
      manifest_(infos_of(scatter_.parts()), options.bucket_bytes),
      options_(options),
      sums_(a_word_for_each_bucket(manifest_, options.device)) {}

std::uint64_t Subscriber::weights_hash() const { return hash_of(sums_); }

void Subscriber::connect(std::unique_ptr<Channel> channel, std::int64_t generation) {
  channel_ = opened(std::move(channel), generation, options_.device, manifest_);
}

void Subscriber::disconnect() {
  if (channel_) channel_->give_up();
  // Its end is that of the channel's operations.
  if (arriving_.valid()) arriving_.wait();
  arriving_ = {};
  channel_.reset();
}

/// Receives one bucket while the one before is checked and written. Returns the damaged ones.
std::vector<std::int64_t> Subscriber::receive_buckets(const std::vector<std::int64_t>& buckets,
                                                      Arrival& arrival) const {
  at::Tensor damaged = a_word_for_each_bucket(manifest_, options_.device);
  Pair pair;
  std::array<at::Tensor, 2> wires;
  const auto start = [&](std::size_t k) {
    at::Tensor& memory = pair.memory[k % 2];
    if (!memory.defined() || options_.staged) memory = bucket_memory(manifest_, options_.device);
    wires[k % 2] = on_wire(memory, manifest_, buckets[k]);
    pair.pending[k % 2] = channel_->start_broadcast(wires[k % 2], 0);
  };
  if (!buckets.empty()) start(0);
  for (std::size_t k = 0; k < buckets.size(); ++k) {
    const at::Tensor wire = wires[k % 2];
    if (k + 1 < buckets.size()) start(k + 1);
    pair.pending[k % 2].wait();
    const auto number = static_cast<std::size_t>(buckets[k]);
    const Inspection found = inspect(wire, arrival.version, buckets[k]);
    arrival.sums.select(0, buckets[k]).copy_(found.sum);
    damaged.select(0, buckets[k]).copy_(found.is_damaged);
    // A damaged one is written too: the host does not wait for what is found, and it comes again
    // before the version counts.
    if (options_.staged) {
      arrival.staged[number] = payload(wire);
    } else {
      scatter_.write(manifest_, number, payload(wire));
    }
  }
  return damaged_anywhere(*channel_, damaged);
}

std::int64_t Subscriber::receive() {
  if (!channel_) throw_error<CommError>("weight sync: not connected to a trainer");
  try {
    return install(arrive());
  } catch (...) {
    // A group whose collective failed is never used again.
    disconnect();
    throw;
  }
}

void Subscriber::start() {
  if (!channel_) throw_error<CommError>("weight sync: not connected to a trainer");
  if (!receives_beside() || arriving_.valid())
    throw InternalError("weight sync: a publication is received beside nothing else");
  arriving_ = std::async(std::launch::async, [this] { return arrive(); });
}

bool Subscriber::has_come() const {
  return arriving_.valid() &&
         arriving_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

std::int64_t Subscriber::await() {
  try {
    arrived_ = arriving_.get();
    return arrived_.version;
  } catch (...) {
    disconnect();
    throw;
  }
}

std::int64_t Subscriber::finish() { return install(std::exchange(arrived_, {})); }

/// Everything but the writing, if the weights are kept apart: it may run on another thread.
Subscriber::Arrival Subscriber::arrive() {
  at::Tensor header = at::zeros({kHeader}, at::kLong);
  channel_->broadcast(header, 0);
  const auto* words = header.const_data_ptr<std::int64_t>();
  Arrival arrival{.version = words[0],
                  .staged = std::vector<at::Tensor>(manifest_.buckets().size()),
                  .sums = a_word_for_each_bucket(manifest_, options_.device)};
  if (words[1] != static_cast<std::int64_t>(manifest_.buckets().size()) ||
      words[2] != static_cast<std::int64_t>(manifest_.hash())) {
    throw_error<CommError>("weight sync: the header of version {} does not fit the manifest",
                           arrival.version);
  }
  if (!options_.staged) is_intact_ = false;
  auto damaged = receive_buckets(all_buckets(manifest_), arrival);
  if (!damaged.empty()) {
    damaged = receive_buckets(damaged, arrival);
    if (!damaged.empty()) fail_damaged(arrival.version, manifest_, damaged);
  }
  at::Tensor word = at::zeros({1}, at::kLong);
  channel_->broadcast(word, 0);
  if (word.item<std::int64_t>() != arrival.version)
    throw_error<CommError>("weight sync: version word {} after header {}",
                           word.item<std::int64_t>(), arrival.version);
  return arrival;
}

std::int64_t Subscriber::install(const Arrival& arrival) {
  for (std::size_t k = 0; options_.staged && k < arrival.staged.size(); ++k)
    scatter_.write(manifest_, k, arrival.staged[k]);
  sums_ = arrival.sums;
  version_ = arrival.version;
  is_intact_ = true;
  return version_;
}

}  // namespace heddle::sync
