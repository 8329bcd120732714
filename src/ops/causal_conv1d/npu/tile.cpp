#include "ops/causal_conv1d/npu/tile.h"

#include <algorithm>

#include "base/errors.h"

namespace heddle::ops::causal_conv1d_npu {
namespace {

constexpr std::int64_t kRowAlignment = 32;  // bytes that the vector unit moves at once
constexpr std::int64_t kFloat = 4;
constexpr std::int64_t kCopies = 2;  // double buffering
constexpr std::int64_t kFewestChannels = 64, kFewestRows = 16;

std::int64_t row_bytes(std::int64_t channels, std::int64_t element_bytes) {
  return (channels * element_bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

/// The most rows that fit beside these columns; none is negative or 0.
std::int64_t rows_that_fit(const ConvShape& shape, std::int64_t channels, std::int64_t limit) {
  const std::int64_t fixed = tile_bytes({0, channels}, shape);
  const std::int64_t per_row = tile_bytes({1, channels}, shape) - fixed;
  return (limit - fixed) / per_row;
}

}  // namespace

std::int64_t tile_bytes(const Tile& tile, const ConvShape& shape) {
  const std::int64_t activation = row_bytes(tile.channels, shape.element_bytes);
  const std::int64_t wide = row_bytes(tile.channels, kFloat);
  const std::int64_t read = tile.tokens + shape.width - 1;
  return kCopies * (read + tile.tokens) * activation + (read + tile.tokens) * wide +
         shape.width * wide;
}

void check_tile_bytes(std::int64_t needed_bytes, std::int64_t limit_bytes) {
  if (needed_bytes <= limit_bytes) return;
  throw_error<DeviceError>(
      "causal_conv1d: the tile needs {} bytes of unified buffer, the vector core has {} ({} and {} "
      "bits)",
      needed_bytes, limit_bytes, needed_bytes * 8, limit_bytes * 8);
}

Tile plan_tile(const ConvShape& shape, std::int64_t limit_bytes) {
  const std::int64_t narrowest = std::min(shape.channels, kFewestChannels);
  check_tile_bytes(tile_bytes({1, narrowest}, shape), limit_bytes);
  const auto fitting = [&](std::int64_t channels) {
    return Tile{std::min(std::max<std::int64_t>(1, shape.tokens),
                         rows_that_fit(shape, channels, limit_bytes)),
                channels};
  };
  Tile best = fitting(narrowest);
  // Wider tiles move longer rows at once, but read the history of width - 1 rows more often.
  for (std::int64_t channels = narrowest * 2; channels <= shape.channels; channels *= 2) {
    const Tile wider = fitting(channels);
    const bool has_rows = wider.tokens >= kFewestRows || wider.tokens >= shape.tokens;
    if (has_rows && wider.tokens * wider.channels >= best.tokens * best.channels) best = wider;
  }
  return best;
}

}  // namespace heddle::ops::causal_conv1d_npu
