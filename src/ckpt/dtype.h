#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

namespace heddle::ckpt {

/// Element types of the safetensors format, in the order in which the format's own library sorts
/// them: a file holds the largest of this order first.
enum class Dtype : std::uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

/// The spelling in the file, for example "BF16".
std::string_view name_of(Dtype dtype);
/// Nothing when the format has no type of that name.
std::optional<Dtype> parse_dtype(std::string_view name);
/// Bits of one element: 4 and 6 for the packed types, else a multiple of 8.
int bits_of(Dtype dtype);
/// BF16, F16, F32, F64: the types whose values a plain cast converts.
bool is_plain_float(Dtype dtype);
/// F4, F6 and F8: weights that mean nothing without their scales.
bool is_scaled_float(Dtype dtype);

/// Nothing for the packed types (F4, F6), which libtorch has no element type for.
std::optional<at::ScalarType> to_scalar_type(Dtype dtype);
/// Nothing when the format has no such type.
std::optional<Dtype> from_scalar_type(at::ScalarType type);

}  // namespace heddle::ckpt
