#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace heddle {

/// Counter-based random numbers, Philox4x32-10 ("Parallel random numbers: as easy as 1, 2, 3",
/// Salmon et al. 2011): a value depends only on (seed, name, index), so it is the same on any rank,
/// in any layout and in any order.
class CounterRng {
 public:
  /// `name` says what the numbers are for, for example a parameter's name.
  CounterRng(std::uint64_t seed, std::string_view name);

  /// Four independent 32-bit words for `index`.
  std::array<std::uint32_t, 4> words(std::uint64_t index) const;
  std::uint64_t bits(std::uint64_t index) const;
  /// Uniform in [0, 1), 53 bits.
  double uniform(std::uint64_t index) const;
  /// Standard normal (Box-Muller).
  double normal(std::uint64_t index) const;
  /// Uniform integer in [0, bound); bound > 0.
  std::uint64_t below(std::uint64_t index, std::uint64_t bound) const;

 private:
  std::uint64_t key_;
  std::uint64_t stream_;
};

}  // namespace heddle
