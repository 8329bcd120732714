#pragma once

#include <cstdint>
#include <vector>

#include "comm/group.h"
#include "sync/part.h"

namespace heddle::sync {

/// Brings the trainer's parts together on its rank 0, bucket by bucket, from whatever layout they
/// have. All trainer ranks make the same calls in the same order: also those that have nothing of a
/// bucket.
class Gather {
 public:
  /// Collective over `trainers`: exchanges the layouts. Throws InternalError unless the ranks
  /// together have each element once. `device`: of the buckets, and what messages between the
  /// trainers are on.
  Gather(comm::Group trainers, std::vector<Part> parts, std::int64_t bucket_bytes,
         c10::Device device = c10::DeviceType::CPU);

  const Manifest& manifest() const { return manifest_; }
  const comm::Group& trainers() const { return trainers_; }
  /// Collective. On rank 0, `bytes` (uint8, at least the bucket's size) receives bucket `number`,
  /// zeros between its tensors; elsewhere it is not touched.
  void collect(std::size_t number, at::Tensor& bytes) const;

 private:
  comm::Group trainers_;
  std::vector<Part> parts_;
  std::vector<HeldRegions> held_;  ///< One for each rank.
  c10::Device device_;
  Manifest manifest_;
};

/// The other end: writes what this rank holds of a bucket in place. Addresses stay as they are.
class Scatter {
 public:
  explicit Scatter(std::vector<Part> parts) : parts_(std::move(parts)) {}
  const std::vector<Part>& parts() const { return parts_; }
  void write(const Manifest& manifest, std::size_t number, const at::Tensor& bytes) const;

 private:
  std::vector<Part> parts_;
};

/// Facts about parts for a manifest.
std::vector<TensorInfo> infos_of(const std::vector<Part>& parts);

}  // namespace heddle::sync
