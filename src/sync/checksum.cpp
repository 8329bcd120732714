#include "sync/checksum.h"

#include <cstring>

#include "base/splitmix.h"

namespace heddle::sync {

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

}  // namespace heddle::sync
