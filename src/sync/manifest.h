#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::sync {

/// A tensor that is published: name, global shape and dtype, the same on both sides.
struct TensorInfo {
  std::string name;
  std::vector<std::int64_t> shape;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool operator==(const TensorInfo&) const = default;
  std::int64_t row_bytes() const;  ///< For one index of dimension 0.
};

/// Rows of dimension 0 of a global tensor, and where in its bucket they begin.
struct Rows {
  std::size_t tensor = 0;
  std::int64_t first = 0, count = 0;
  std::int64_t offset = 0;  ///< In bytes, a multiple of 16.
};

struct Bucket {
  std::vector<Rows> rows;
  std::int64_t bytes = 0;
};

/// Published tensors in their order. A pure function of the tensors and the size of a bucket,
/// so that trainer and rollout make it alone and compare it before the first byte.
class Manifest {
 public:
  /// Tensors in any order; they are sorted by name. A row larger than a bucket has one of its own.
  /// Throws ConfigError for a bucket below 1 KiB, InternalError if a name occurs twice.
  Manifest(std::vector<TensorInfo> tensors, std::int64_t bucket_bytes);

  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  std::int64_t bytes() const;  ///< Of all buckets.
  std::int64_t largest_bucket() const;
  /// Hash of text(): 64 bits.
  std::uint64_t hash() const;
  /// A line for each tensor, and the size of a bucket.
  std::string text() const;

 private:
  std::vector<TensorInfo> tensors_;
  std::int64_t bucket_bytes_;
  std::vector<Bucket> buckets_;
};

/// The first line in which two manifests differ, as a sentence.
std::string first_difference(std::string_view ours, std::string_view theirs);

}  // namespace heddle::sync
