#pragma once

#include <cstdint>

/// Philox4x32-10 ("Parallel random numbers: as easy as 1, 2, 3", Salmon et al. 2011). Plain C++,
/// constexpr so that CUDA sources may call it too.
namespace heddle::philox {

struct Words {
  std::uint32_t word[4];
};

/// Four independent 32-bit words for a key and a counter of two 64-bit halves.
constexpr Words words(std::uint64_t key, std::uint64_t index, std::uint64_t stream) {
  constexpr std::uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  std::uint32_t c0 = static_cast<std::uint32_t>(index),
                c1 = static_cast<std::uint32_t>(index >> 32),
                c2 = static_cast<std::uint32_t>(stream),
                c3 = static_cast<std::uint32_t>(stream >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = static_cast<std::uint64_t>(kMultiplier0) * c0;
    const std::uint64_t p1 = static_cast<std::uint64_t>(kMultiplier1) * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(p1);
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(p0);
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

/// Uniform in [0, 1), 53 bits, of the first two words.
constexpr double uniform(const Words& w) {
  return static_cast<double>((static_cast<std::uint64_t>(w.word[1]) << 32 | w.word[0]) >> 11) *
         0x1p-53;
}

}  // namespace heddle::philox
