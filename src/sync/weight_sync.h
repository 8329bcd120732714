#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "sync/channel.h"
#include "sync/gather.h"

/// Publication of weights from a trainer to rollout engines.
///
///     trainer ranks --Gather--> rank 0 --Channel--> rollout ranks --Scatter--> in place
///
/// Both sides make the manifest alone and compare it. An update is a header, buckets with a
/// checksum each, the count of damaged ones (sent once more), and last the version word. On a
/// device the host queues all buckets and waits once, for the checksums.
namespace heddle::sync {

struct SyncOptions {
  std::int64_t bucket_bytes = std::int64_t{256} << 20;
  /// Rollout: keeps all buckets until every rank has them whole, so that a failed update leaves the
  /// weights as they were. Costs the memory of a second copy.
  bool staged = false;
  /// Buckets' place. The weights' own: they travel from device to device by its library, and no
  /// copy of the weights is on the host. The host: by Gloo. All members have the same kind.
  c10::Device device = c10::DeviceType::CPU;
};

struct SyncReport {
  std::int64_t bytes = 0, buckets = 0;
  std::int64_t damaged = 0;  ///< Buckets that were sent again.
  double seconds = 0;        ///< From the first call to the version word.
  /// The weights' hash, whatever their version and the trainer's layout; on rank 0. The rollouts'
  /// is the same (Subscriber::weights_hash).
  std::uint64_t weights_hash = 0;
};

/// The trainer's side. Every trainer rank has one and makes the same calls.
class Publisher {
 public:
  /// Collective over `trainers`.
  Publisher(comm::Group trainers, std::vector<Part> parts, SyncOptions options);
  /// On trainer rank 0, with this side's end of a new channel: warms it up and compares manifests.
  /// Throws CommError, and ModelError that names the first tensor that differs. Also after a
  /// failure, with a channel of a new generation.
  void connect(std::unique_ptr<Channel> channel, std::int64_t generation);
  /// Ends what is under way on the channel. publish() does so where it fails; after any other
  /// failure call it before another channel is made.
  void disconnect();
  /// Collective over the trainers. If the channel fails, all trainer ranks finish their part and
  /// then throw the CommError; the version counts as not published.
  SyncReport publish(std::int64_t version);
  /// Collective over the trainers: SyncReport::weights_hash of the weights as they are, on rank 0,
  /// without a channel.
  std::uint64_t weights_hash();
  const Manifest& manifest() const { return gather_.manifest(); }

 private:
  std::vector<std::int64_t> send(const std::vector<std::int64_t>& buckets, std::int64_t version,
                                 std::string& failure);
  void tell_trainers(const std::string& failure) const;
  bool is_sender() const { return gather_.trainers().rank() == 0; }

  Gather gather_;
  c10::Device device_;
  std::unique_ptr<Channel> channel_;
  at::Tensor sums_;  ///< Checksum of each bucket, on the device.
};

/// The side of one rollout rank.
class Subscriber {
 public:
  Subscriber(std::vector<Part> parts, SyncOptions options);
  /// As Publisher::connect.
  void connect(std::unique_ptr<Channel> channel, std::int64_t generation);
  /// Ends what is under way, as Publisher::disconnect does.
  void disconnect();
  /// Waits for the next publication and returns its version. Throws CommError if it fails:
  /// version() is then the old one, and unless is_intact() the weights are of two versions and must
  /// not be served before another publication has come.
  std::int64_t receive();

  /// Publications can come while the caller goes on with the weights that it has: they are kept
  /// apart, and their buckets lie on the host. A device's library is called by the thread that owns
  /// the device.
  bool receives_beside() const { return options_.staged && options_.device.is_cpu(); }
  /// Begins to receive the next publication on a thread of its own; the weights stay as they are up
  /// to finish(). Only if receives_beside(). The subscriber outlives it: it ends with the channel's
  /// deadline at the latest.
  void start();
  /// It is there, or will not come: await() returns at once.
  bool has_come() const;
  /// Waits until it is there, and returns its version. Throws as receive(), with the weights as
  /// they were.
  std::int64_t await();
  /// Writes it in place, after await(); returns its version.
  std::int64_t finish();

  /// Last received whole; -1: none yet.
  std::int64_t version() const { return version_; }
  bool is_intact() const { return is_intact_; }
  /// Hash of the weights of version(), as they arrived.
  std::uint64_t weights_hash() const;

 private:
  /// A publication of which every rank has all.
  struct Arrival {
    std::int64_t version = -1;
    std::vector<at::Tensor> staged;  ///< Payloads of the buckets, if they are kept apart.
    at::Tensor sums;                 ///< Checksum of each bucket, on the device.
  };
  Arrival arrive();
  std::vector<std::int64_t> receive_buckets(const std::vector<std::int64_t>& buckets,
                                            Arrival& arrival) const;
  std::int64_t install(const Arrival& arrival);

  Scatter scatter_;
  Manifest manifest_;
  SyncOptions options_;
  std::unique_ptr<Channel> channel_;
  Arrival arrived_;  ///< From await() to finish().
  at::Tensor sums_;  ///< For version_.
  std::int64_t version_ = -1;
  bool is_intact_ = true;
  std::future<Arrival> arriving_;  ///< From start() to await(). Last: it goes first, and waits.
};

}  // namespace heddle::sync
