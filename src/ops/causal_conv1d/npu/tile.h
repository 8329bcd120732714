#pragma once

#include <cstdint>

namespace heddle::ops::causal_conv1d_npu {

/// Work of one vector core at a time: rows of tokens by columns of channels.
struct Tile {
  std::int64_t tokens = 0, channels = 0;
  bool operator==(const Tile&) const = default;
};

/// Input that is cut into tiles, on one rank.
struct ConvShape {
  std::int64_t tokens = 0, channels = 0, width = 0;
  std::int64_t element_bytes = 2;  ///< Size of an activation.
};

/// Unified buffer that a tile occupies, in bytes: the rows read (with width - 1 rows of history)
/// and the rows written, each twice in the activations' dtype, since one half moves while the other
/// is worked on; the rows read and the sum in fp32; the weights in fp32. Rows are padded to 32
/// bytes.
std::int64_t tile_bytes(const Tile& tile, const ConvShape& shape);

/// The tile with the most elements that fits `limit_bytes`: as many rows as fit beside at least 64
/// columns, so that the history is a small part of what is read. Throws DeviceError if not even one
/// row of the narrowest tile fits.
Tile plan_tile(const ConvShape& shape, std::int64_t limit_bytes);

/// Throws DeviceError with both byte counts if the bytes a tile asks for are more than the limit.
void check_tile_bytes(std::int64_t needed_bytes, std::int64_t limit_bytes);

}  // namespace heddle::ops::causal_conv1d_npu
