#include "base/rng.h"

#include <cmath>
#include <numbers>

#include "base/hash.h"

namespace heddle {

CounterRng::CounterRng(std::uint64_t seed, std::string_view name)
    : key_(seed), stream_(hash::of(name)) {}

std::array<std::uint32_t, 4> CounterRng::words(std::uint64_t index) const {
  constexpr std::uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  std::array<std::uint32_t, 4> c = {
      static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
      static_cast<std::uint32_t>(stream_), static_cast<std::uint32_t>(stream_ >> 32)};
  auto k0 = static_cast<std::uint32_t>(key_), k1 = static_cast<std::uint32_t>(key_ >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = static_cast<std::uint64_t>(kMultiplier0) * c[0];
    const std::uint64_t p1 = static_cast<std::uint64_t>(kMultiplier1) * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(p0)};
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return c;
}

std::uint64_t CounterRng::bits(std::uint64_t index) const {
  const auto w = words(index);
  return static_cast<std::uint64_t>(w[1]) << 32 | w[0];
}

double CounterRng::uniform(std::uint64_t index) const {
  return static_cast<double>(bits(index) >> 11) * 0x1p-53;
}

double CounterRng::normal(std::uint64_t index) const {
  const auto w = words(index);
  // The first is in (0, 1], so that its logarithm is finite.
  const double u =
      (static_cast<double>(static_cast<std::uint64_t>(w[1]) << 32 | w[0]) + 1) * 0x1p-64;
  const double v = static_cast<double>(static_cast<std::uint64_t>(w[3]) << 32 | w[2]) * 0x1p-64;
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
}

std::uint64_t CounterRng::below(std::uint64_t index, std::uint64_t bound) const {
  // The bias of the multiply-shift is below bound / 2^64.
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(bits(index)) * bound) >> 64);
}

}  // namespace heddle
