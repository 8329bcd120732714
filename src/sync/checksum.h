#pragma once

#include <cstdint>
#include <span>

namespace heddle::sync {

/// The sum, modulo 2^64, of the mixed 64-bit words of `bytes`, each mixed with its place: the order
/// of the additions does not matter, so that devices and layouts may sum as they like. The last
/// word is padded with zeros. `seed` distinguishes buckets and versions.
std::uint64_t checksum(std::span<const std::uint8_t> bytes, std::uint64_t seed);

}  // namespace heddle::sync
