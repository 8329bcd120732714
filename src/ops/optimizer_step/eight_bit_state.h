#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

/// eight_bit.h on tensors. Codes are uint8 of the values' shape, of which the last dimension is a
/// multiple of eight_bit::kBlock; scales are fp32, one for each block.
namespace heddle::ops::eight_bit {

enum class Kind {
  kMoment,  ///< Signed; 0 where a magnitude is below the smallest code and rounds down.
  kRoot,    ///< Not negative; only 0 becomes 0.
};

/// Zeros of a tensor's shape and device: codes and scales.
at::Tensor zero_codes(const at::Tensor& like);
at::Tensor zero_scales(const at::Tensor& like);

/// fp32 values.
at::Tensor decoded(const at::Tensor& codes, const at::Tensor& scales, Kind kind);
/// Writes codes and scales of fp32 `values`; `random`: fp32 of their shape, uniform in [0, 1).
void encode(const at::Tensor& values, const at::Tensor& random, Kind kind, at::Tensor codes,
            at::Tensor scales);

}  // namespace heddle::ops::eight_bit
