#include "sync/checksum.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>

#include "base/splitmix.h"
#include "ops/splitmix.h"

namespace heddle::sync {
namespace {

/// Words whose mixed values are in memory at a time, on devices without a kernel of their own.
constexpr std::int64_t kChunk = std::int64_t{1} << 22;

}  // namespace

std::uint64_t checksum(std::span<const std::uint8_t> bytes, std::uint64_t seed) {
  std::uint64_t sum = splitmix::bits(seed, bytes.size());
  const auto add = [&](std::size_t at, std::size_t count) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, count);
    // A word that moves changes the sum.
    sum += splitmix::mixed(word + (at / 8 + 1) * splitmix::kStride);
  };
  const std::size_t whole = bytes.size() / 8 * 8;
  for (std::size_t at = 0; at < whole; at += 8) add(at, 8);
  if (whole < bytes.size()) add(whole, bytes.size() - whole);
  return sum;
}

at::Tensor checksum(const at::Tensor& words, std::uint64_t seed) {
  TORCH_CHECK(words.dim() == 1 && words.scalar_type() == at::kLong && words.is_contiguous(),
              "checksum: words ", words.sizes(), " ", words.scalar_type(),
              " must be [n] int64 in a row");
  if (words.is_cuda()) return cuda_checksum(words, seed);
  const auto number = [](std::uint64_t x) { return ops::splitmix::number(x); };
  if (words.is_cpu()) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(words.const_data_ptr<std::int64_t>());
    const std::uint64_t sum = checksum(std::span(bytes, words.nbytes()), seed);
    return at::full({}, number(sum), words.options());
  }
  at::Tensor sum = at::full({}, number(splitmix::bits(seed, words.nbytes())), words.options());
  for (std::int64_t first = 0; first < words.numel(); first += kChunk) {
    const std::int64_t count = std::min(kChunk, words.numel() - first);
    at::Tensor mixed = at::arange(first + 1, first + count + 1, words.options());
    mixed.mul_(number(splitmix::kStride)).add_(words.narrow(0, first, count));
    sum.add_(ops::splitmix::mixed(mixed).sum());
  }
  return sum;
}

}  // namespace heddle::sync
