#include "sync/weight_sync.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <future>
#include <numeric>
#include <span>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "sync/checksum.h"

namespace heddle::sync {
namespace {

using Clock = std::chrono::steady_clock;

/// After a bucket's bytes: their checksum, which the version does not enter, and version and
/// number.
struct Trailer {
  std::uint64_t sum = 0, key = 0;
};
constexpr std::int64_t kTrailerBytes = sizeof(Trailer);

Trailer trailer_of(const at::Tensor& bytes, std::int64_t count, std::int64_t version,
                   std::int64_t bucket) {
  const auto number = static_cast<std::uint64_t>(bucket);
  const std::span payload(bytes.const_data_ptr<std::uint8_t>(), static_cast<std::size_t>(count));
  return {checksum(payload, number), static_cast<std::uint64_t>(version) << 32 | number};
}

void write_trailer(at::Tensor& bytes, std::int64_t count, const Trailer& trailer) {
  std::memcpy(bytes.mutable_data_ptr<std::uint8_t>() + count, &trailer, sizeof trailer);
}

bool has_trailer(const at::Tensor& bytes, std::int64_t count, const Trailer& expected) {
  Trailer trailer;
  std::memcpy(&trailer, bytes.const_data_ptr<std::uint8_t>() + count, sizeof trailer);
  return trailer.key == expected.key && trailer.sum == expected.sum;
}

std::uint64_t hash_of(const std::vector<std::uint64_t>& sums) {
  return checksum(
      {reinterpret_cast<const std::uint8_t*>(sums.data()), sums.size() * sizeof(sums[0])}, 0);
}

std::int64_t buffer_bytes(const Manifest& manifest) {
  return manifest.largest_bucket() + kTrailerBytes;
}

/// All members say which buckets they got damaged; returns those that anybody did.
std::vector<std::int64_t> damaged_anywhere(Channel& channel, const Manifest& manifest,
                                           const std::vector<std::int64_t>& damaged_here) {
  at::Tensor counts =
      at::zeros({static_cast<std::int64_t>(manifest.buckets().size()) + 1}, at::kLong);
  auto* count = counts.mutable_data_ptr<std::int64_t>();
  for (const std::int64_t bucket : damaged_here) count[bucket] = 1;
  channel.sum(counts);
  std::vector<std::int64_t> damaged;
  for (std::int64_t k = 0; k + 1 < counts.numel(); ++k) {
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
    : gather_(std::move(trainers), std::move(parts), options.bucket_bytes),
      sums_(manifest().buckets().size()) {}

void Publisher::connect(std::unique_ptr<Channel> channel, std::int64_t generation) {
  warm_up(*channel, generation);
  compare(*channel, manifest());
  channel_ = std::move(channel);
}

/// Collective over the trainers. Collects into one buffer while the other is on the wire; goes on
/// collecting after the channel has failed, because the other trainer ranks do.
std::vector<std::int64_t> Publisher::send(const std::vector<std::int64_t>& buckets,
                                          std::int64_t version, std::string& failure) {
  const bool is_sender = gather_.trainers().rank() == 0;
  std::array<at::Tensor, 2> buffers;
  std::array<at::Tensor, 2> sent;
  std::future<void> on_wire;
  const auto finish = [&] {
    if (!on_wire.valid()) return;
    try {
      on_wire.get();
    } catch (const std::exception& error) {
      if (failure.empty()) failure = error.what();
    }
  };
  for (std::size_t k = 0; k < buckets.size(); ++k) {
    const auto number = static_cast<std::size_t>(buckets[k]);
    at::Tensor& buffer = buffers[k % 2];
    if (is_sender && !buffer.defined()) buffer = at::zeros({buffer_bytes(manifest())}, at::kByte);
    gather_.collect(number, buffer);
    if (!is_sender) continue;
    const std::int64_t bytes = manifest().buckets()[number].bytes;
    const Trailer trailer = trailer_of(buffer, bytes, version, buckets[k]);
    write_trailer(buffer, bytes, trailer);
    sums_[number] = trailer.sum;
    finish();
    if (!failure.empty()) continue;
    sent[k % 2] = buffer.narrow(0, 0, bytes + kTrailerBytes);
    on_wire = std::async(std::launch::async,
                         [this, &tensor = sent[k % 2]] { channel_->broadcast(tensor, 0); });
  }
  finish();
  if (!is_sender || !failure.empty()) return {};
  try {
    return damaged_anywhere(*channel_, manifest(), {});
  } catch (const std::exception& error) {
    failure = error.what();
    return {};
  }
}

void Publisher::tell_trainers(const std::string& failure) const {
  const auto failures = gather_.trainers().all_gather_objects(failure);
  if (!failures[0].empty()) throw_error<CommError>("{}", failures[0]);
}

SyncReport Publisher::publish(std::int64_t version) {
  const auto begin = Clock::now();
  const bool is_sender = gather_.trainers().rank() == 0;
  const auto count = static_cast<std::int64_t>(manifest().buckets().size());
  std::string failure;
  if (is_sender && !channel_) failure = "weight sync: no rollout is connected";
  const auto guarded = [&](const auto& work) {
    if (!is_sender || !failure.empty()) return;
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
  if (is_sender && !failure.empty()) channel_.reset();
  tell_trainers(failure);
  return {manifest().bytes(), count, static_cast<std::int64_t>(damaged.size()),
          std::chrono::duration<double>(Clock::now() - begin).count(), hash_of(sums_)};
}

Subscriber::Subscriber(std::vector<Part> parts, SyncOptions options)
    : scatter_(std::move(parts)),
      manifest_(infos_of(scatter_.parts()), options.bucket_bytes),
      options_(options),
      sums_(manifest_.buckets().size()) {}

std::uint64_t Subscriber::weights_hash() const { return hash_of(sums_); }

void Subscriber::connect(std::unique_ptr<Channel> channel, std::int64_t generation) {
  warm_up(*channel, generation);
  compare(*channel, manifest_);
  channel_ = std::move(channel);
}

/// Receives one bucket while the one before is checked and written. Returns the damaged ones.
std::vector<std::int64_t> Subscriber::receive_buckets(const std::vector<std::int64_t>& buckets,
                                                      std::int64_t version,
                                                      std::vector<at::Tensor>& staged) {
  std::vector<std::int64_t> damaged;
  std::array<at::Tensor, 2> buffers;
  const auto bytes_of = [&](std::size_t k) {
    return manifest_.buckets()[static_cast<std::size_t>(buckets[k])].bytes;
  };
  const auto start = [&](std::size_t k) {
    at::Tensor& buffer = buffers[k % 2];
    if (!buffer.defined() || options_.staged)
      buffer = at::empty({buffer_bytes(manifest_)}, at::kByte);
    return std::async(std::launch::async,
                      [this, tensor = buffer.narrow(0, 0, bytes_of(k) + kTrailerBytes)]() mutable {
                        channel_->broadcast(tensor, 0);
                      });
  };
  std::future<void> coming;
  for (std::size_t k = 0; k < buckets.size(); ++k) {
    if (k == 0) coming = start(0);
    coming.get();
    const at::Tensor here = buffers[k % 2];
    if (k + 1 < buckets.size()) coming = start(k + 1);
    const auto number = static_cast<std::size_t>(buckets[k]);
    const Trailer trailer = trailer_of(here, bytes_of(k), version, buckets[k]);
    sums_[number] = trailer.sum;
    if (!has_trailer(here, bytes_of(k), trailer)) {
      damaged.push_back(buckets[k]);
    } else if (options_.staged) {
      staged[number] = here;
    } else {
      scatter_.write(manifest_, number, here);
    }
  }
  return damaged_anywhere(*channel_, manifest_, damaged);
}

std::int64_t Subscriber::receive() {
  if (!channel_) throw_error<CommError>("weight sync: not connected to a trainer");
  try {
    return receive_version();
  } catch (...) {
    // A group whose collective failed is never used again.
    channel_.reset();
    throw;
  }
}

std::int64_t Subscriber::receive_version() {
  at::Tensor header = at::zeros({kHeader}, at::kLong);
  channel_->broadcast(header, 0);
  const auto* words = header.const_data_ptr<std::int64_t>();
  const std::int64_t version = words[0];
  if (words[1] != static_cast<std::int64_t>(manifest_.buckets().size()) ||
      words[2] != static_cast<std::int64_t>(manifest_.hash())) {
    throw_error<CommError>("weight sync: the header of version {} does not fit the manifest",
                           version);
  }
  std::vector<at::Tensor> staged(manifest_.buckets().size());
  if (!options_.staged) is_intact_ = false;
  auto damaged = receive_buckets(all_buckets(manifest_), version, staged);
  if (!damaged.empty()) {
    damaged = receive_buckets(damaged, version, staged);
    if (!damaged.empty()) fail_damaged(version, manifest_, damaged);
  }
  at::Tensor word = at::zeros({1}, at::kLong);
  channel_->broadcast(word, 0);
  if (word.item<std::int64_t>() != version)
    throw_error<CommError>("weight sync: version word {} after header {}",
                           word.item<std::int64_t>(), version);
  for (std::size_t k = 0; options_.staged && k < staged.size(); ++k)
    scatter_.write(manifest_, k, staged[k]);
  version_ = version;
  is_intact_ = true;
  return version;
}

}  // namespace heddle::sync
