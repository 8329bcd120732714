#include "sync/manifest.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "base/errors.h"
#include "base/hash.h"
#include "base/text.h"

namespace heddle::sync {
namespace {

/// Every dtype may be read at its place in a bucket.
constexpr std::int64_t kAlignment = 16;
constexpr std::int64_t kSmallestBucket = 1 << 10;

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

std::int64_t TensorInfo::row_bytes() const {
  const auto width = static_cast<std::int64_t>(c10::elementSize(dtype));
  return std::accumulate(shape.begin() + (shape.empty() ? 0 : 1), shape.end(), width,
                         std::multiplies<>());
}

Manifest::Manifest(std::vector<TensorInfo> tensors, std::int64_t bucket_bytes)
    : tensors_(std::move(tensors)), bucket_bytes_(bucket_bytes) {
  if (bucket_bytes < kSmallestBucket) {
    throw_error<ConfigError>("sync.bucket_bytes: expected at least {}, found {}", kSmallestBucket,
                             bucket_bytes);
  }
  std::sort(tensors_.begin(), tensors_.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  Bucket bucket;
  const auto close = [&] {
    if (!bucket.rows.empty()) buckets_.push_back(std::exchange(bucket, {}));
  };
  for (std::size_t k = 0; k < tensors_.size(); ++k) {
    const TensorInfo& tensor = tensors_[k];
    if (k > 0 && tensors_[k - 1].name == tensor.name)
      throw_error<InternalError>("tensor {} is published twice", tensor.name);
    const std::int64_t row = tensor.row_bytes(), count = tensor.shape.empty() ? 1 : tensor.shape[0];
    if (row == 0) continue;
    for (std::int64_t first = 0; first < count;) {
      if (bucket.bytes > 0 && bucket.bytes + row > bucket_bytes) close();
      const std::int64_t fits = std::max<std::int64_t>(1, (bucket_bytes - bucket.bytes) / row);
      const std::int64_t rows = std::min(fits, count - first);
      bucket.rows.push_back({k, first, rows, bucket.bytes});
      bucket.bytes = aligned(bucket.bytes + rows * row);
      first += rows;
    }
  }
  close();
}

std::int64_t Manifest::bytes() const {
  std::int64_t bytes = 0;
  for (const Bucket& bucket : buckets_) bytes += bucket.bytes;
  return bytes;
}

std::int64_t Manifest::largest_bucket() const {
  std::int64_t bytes = 0;
  for (const Bucket& bucket : buckets_) bytes = std::max(bytes, bucket.bytes);
  return bytes;
}

std::uint64_t Manifest::hash() const { return hash::of(text()); }

std::string Manifest::text() const {
  std::string text = fmt::format("bucket_bytes {}\n", bucket_bytes_);
  for (const TensorInfo& tensor : tensors_) {
    text += fmt::format("{} {} [{}]\n", tensor.name, c10::toString(tensor.dtype),
                        fmt::join(tensor.shape, ", "));
  }
  return text;
}

std::string first_difference(std::string_view ours, std::string_view theirs) {
  const auto left = text::split(ours, '\n'), right = text::split(theirs, '\n');
  for (std::size_t k = 0; k < std::max(left.size(), right.size()); ++k) {
    const std::string a = k < left.size() ? left[k] : "", b = k < right.size() ? right[k] : "";
    if (a != b) {
      return fmt::format("'{}' here, '{}' there", a.empty() ? "nothing more" : a,
                         b.empty() ? "nothing more" : b);
    }
  }
  return "no difference";
}

}  // namespace heddle::sync
