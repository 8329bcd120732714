#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "ops/cuda/fp8.h"

/// Matrices in 8-bit floats that travel beside the bf16 ones whose numbers they are: whoever makes
/// a tensor has its rows in registers and writes them in both forms, where a conversion of its own
/// would read all of it again.
namespace heddle::ops::cuda {

/// Matrices of fewer rows or columns stay in the model's type: conversions and launches cost more
/// than such products gain.
inline constexpr std::int64_t kFewestEightBitRows = 512, kNarrowestEightBit = 512;

/// About scales * values, row by row.
struct EightBitRows {
  at::Tensor values;  ///< [T,n] e4m3
  at::Tensor scales;  ///< [T,1] fp32
};

/// Uninitialised, of x's [T,n]; nothing where no product reads such rows in 8 bits: too few, too
/// narrow, or not multiples of 16.
std::optional<EightBitRows> eight_bit_for(const at::Tensor& x);

/// For a kernel that writes them.
Fp8Rows places_in(const EightBitRows& rows);

/// Lays `rows` beside x, which was just made; they go where x goes and where it is detached.
void lay_beside(const at::Tensor& x, EightBitRows rows);

bool has_beside(const at::Tensor& x);

/// The form beside x, which stays there for another product; nothing where take_beside gives none.
std::optional<EightBitRows> look_beside(const at::Tensor& x);

/// The form beside x, which afterwards has nothing there, so that it does not outlive its use; nor
/// if x was written to since.
std::optional<EightBitRows> take_beside(const at::Tensor& x);

}  // namespace heddle::ops::cuda
