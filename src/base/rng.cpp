#include "base/rng.h"

#include <cmath>
#include <numbers>

#include "base/hash.h"
#include "base/philox.h"

namespace heddle {

CounterRng::CounterRng(std::uint64_t seed, std::string_view name)
    : key_(seed), stream_(hash::of(name)) {}

std::array<std::uint32_t, 4> CounterRng::words(std::uint64_t index) const {
  const philox::Words w = philox::words(key_, index, stream_);
  return {w.word[0], w.word[1], w.word[2], w.word[3]};
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
