#pragma once

#include <cstdint>
#include <span>

#include <ATen/core/Tensor.h>

namespace heddle::sync {

/// The sum, modulo 2^64, of the mixed 64-bit words of `bytes`, each mixed with its place: the order
/// of the additions does not matter, so that devices and layouts may sum as they like. The last
/// word is padded with zeros. `seed` distinguishes buckets and versions.
std::uint64_t checksum(std::span<const std::uint8_t> bytes, std::uint64_t seed);

/// Checksum of words [n] int64, a 0-d int64 whose pattern stands for the unsigned number, on their
/// device and in its queue: the host does not wait.
at::Tensor checksum(const at::Tensor& words, std::uint64_t seed);

/// checksum() of words on a CUDA device. Defined in cuda/, or in stub/ in a build without.
at::Tensor cuda_checksum(const at::Tensor& words, std::uint64_t seed);

}  // namespace heddle::sync
