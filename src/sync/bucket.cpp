#include "sync/bucket.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include "sync/checksum.h"

namespace heddle::sync {
namespace {

constexpr std::int64_t kWordBytes = 8, kTrailerWords = 2;

at::Tensor words_before_trailer(const at::Tensor& wire) {
  return wire.narrow(0, 0, wire.numel() - kTrailerWords);
}

std::int64_t key_of(std::int64_t version, std::int64_t number) { return version << 32 | number; }

at::Tensor checksum_of(const at::Tensor& wire, std::int64_t number) {
  return checksum(words_before_trailer(wire), static_cast<std::uint64_t>(number));
}

}  // namespace

at::Tensor bucket_memory(const Manifest& manifest, c10::Device device) {
  return at::zeros({manifest.largest_bucket() / kWordBytes + kTrailerWords},
                   at::TensorOptions(device).dtype(at::kLong));
}

at::Tensor on_wire(const at::Tensor& memory, const Manifest& manifest, std::int64_t number) {
  const std::int64_t bytes = manifest.buckets()[static_cast<std::size_t>(number)].bytes;
  return memory.narrow(0, 0, bytes / kWordBytes + kTrailerWords);
}

at::Tensor payload(const at::Tensor& wire) { return words_before_trailer(wire).view(at::kByte); }

at::Tensor seal(const at::Tensor& wire, std::int64_t version, std::int64_t number) {
  const std::int64_t words = wire.numel() - kTrailerWords;
  at::Tensor sum = checksum_of(wire, number);
  wire.select(0, words).copy_(sum);
  wire.select(0, words + 1).fill_(key_of(version, number));
  return sum;
}

Inspection inspect(const at::Tensor& wire, std::int64_t version, std::int64_t number) {
  const std::int64_t words = wire.numel() - kTrailerWords;
  at::Tensor sum = checksum_of(wire, number);
  const at::Tensor differs = wire.select(0, words).ne(sum).logical_or(
      wire.select(0, words + 1).ne(key_of(version, number)));
  return {std::move(sum), differs.to(at::kLong)};
}

}  // namespace heddle::sync
