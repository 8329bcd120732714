#include "ckpt/dtype.h"

#include <array>

#include "base/errors.h"

namespace heddle::ckpt {
namespace {

struct Row {
  Dtype dtype;
  std::string_view name;
  int bits;
  std::optional<at::ScalarType> scalar;
};

constexpr std::array<Row, 22> kRows = {{
    {Dtype::kBool, "BOOL", 8, at::kBool},
    {Dtype::kF4, "F4", 4, std::nullopt},
    {Dtype::kF6E2M3, "F6_E2M3", 6, std::nullopt},
    {Dtype::kF6E3M2, "F6_E3M2", 6, std::nullopt},
    {Dtype::kU8, "U8", 8, at::kByte},
    {Dtype::kI8, "I8", 8, at::kChar},
    {Dtype::kF8E5M2, "F8_E5M2", 8, at::kFloat8_e5m2},
    {Dtype::kF8E4M3, "F8_E4M3", 8, at::kFloat8_e4m3fn},
    {Dtype::kF8E8M0, "F8_E8M0", 8, at::kFloat8_e8m0fnu},
    {Dtype::kF8E4M3Fnuz, "F8_E4M3FNUZ", 8, at::kFloat8_e4m3fnuz},
    {Dtype::kF8E5M2Fnuz, "F8_E5M2FNUZ", 8, at::kFloat8_e5m2fnuz},
    {Dtype::kI16, "I16", 16, at::kShort},
    {Dtype::kU16, "U16", 16, at::kUInt16},
    {Dtype::kF16, "F16", 16, at::kHalf},
    {Dtype::kBF16, "BF16", 16, at::kBFloat16},
    {Dtype::kI32, "I32", 32, at::kInt},
    {Dtype::kU32, "U32", 32, at::kUInt32},
    {Dtype::kF32, "F32", 32, at::kFloat},
    {Dtype::kC64, "C64", 64, at::kComplexFloat},
    {Dtype::kF64, "F64", 64, at::kDouble},
    {Dtype::kI64, "I64", 64, at::kLong},
    {Dtype::kU64, "U64", 64, at::kUInt64},
}};

const Row& row_of(Dtype dtype) { return kRows.at(static_cast<std::size_t>(dtype)); }

}  // namespace

std::string_view name_of(Dtype dtype) { return row_of(dtype).name; }

std::optional<Dtype> parse_dtype(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

int bits_of(Dtype dtype) { return row_of(dtype).bits; }

bool is_plain_float(Dtype dtype) {
  return dtype == Dtype::kF64 || dtype == Dtype::kF32 || dtype == Dtype::kF16 ||
         dtype == Dtype::kBF16;
}

bool is_scaled_float(Dtype dtype) { return name_of(dtype).starts_with("F") && bits_of(dtype) <= 8; }

std::optional<at::ScalarType> to_scalar_type(Dtype dtype) { return row_of(dtype).scalar; }

std::optional<Dtype> from_scalar_type(at::ScalarType type) {
  for (const Row& row : kRows) {
    if (row.scalar == type) return row.dtype;
  }
  return std::nullopt;
}

}  // namespace heddle::ckpt
