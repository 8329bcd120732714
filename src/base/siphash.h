#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace heddle::hash {

using Key128 = std::array<std::uint8_t, 16>;

/// SipHash-2-4 with 128 bits of output: what only those who have the key can compute. "SipHash: a
/// fast short-input PRF" (Aumasson and Bernstein, 2012).
Key128 siphash(const Key128& key, std::string_view bytes);

/// A key from a secret of any length.
Key128 key_of(std::string_view secret);

/// 128 bits that nobody can guess. Throws FileError if the system has none.
Key128 random_key();

/// Takes the same time for every pair.
bool equal(const Key128& a, const Key128& b);

}  // namespace heddle::hash
