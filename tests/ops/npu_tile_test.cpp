#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "device/npu_chip.h"
#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/causal_conv1d/npu/tile.h"

namespace heddle::ops::causal_conv1d_npu {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr std::int64_t kLimit = device::kUnifiedBufferBytes;

TEST(NpuConvTile, BytesAreThoseOfEveryBuffer) {
  // 64 columns: 128 bytes of bf16 and 256 of fp32 a row; 10 rows written, 13 read, 4 of weights.
  EXPECT_EQ(tile_bytes({10, 64}, {1000, 64, 4, 2}), 2 * 23 * 128 + 23 * 256 + 4 * 256);
  // A row of 5 bf16 channels is padded to 32 bytes.
  EXPECT_EQ(tile_bytes({1, 5}, {1, 5, 2, 2}), 2 * 3 * 32 + 3 * 32 + 2 * 32);
}

TEST(NpuConvTile, PlansFillTheBufferAndNeverPassIt) {
  for (const std::int64_t channels : {1, 17, 64, 96, 640, 3072, 6144, 8192, 10240, 12288}) {
    for (const std::int64_t tokens : {0, 1, 29, 1000, 131072}) {
      for (const std::int64_t width : {2, 4, 8}) {
        for (const std::int64_t element_bytes : {2, 4}) {
          const ConvShape shape{tokens, channels, width, element_bytes};
          const Tile tile = plan_tile(shape, kLimit);
          EXPECT_GE(tile.tokens, 1);
          EXPECT_LE(tile.channels, channels);
          EXPECT_LE(tile_bytes(tile, shape), kLimit);
          if (tile.tokens < tokens) {
            EXPECT_GT(tile_bytes({tile.tokens + 1, tile.channels}, shape), kLimit)
                << "another row of " << channels << " channels would fit";
          }
        }
      }
    }
  }
}

TEST(NpuConvTile, TheTileKnownToFailIsRefusedWithBothByteCounts) {
  EXPECT_THAT([] { check_tile_bytes(1840384 / 8, kLimit); },
              ThrowsMessage<DeviceError>(AllOf(HasSubstr("230048 bytes"), HasSubstr("196608"),
                                               HasSubstr("1840384"), HasSubstr("1572864"))));
  // A plan without regard to the buffer for a long context: 128 rows of 256
  // columns.
  const ConvShape shape{131072, 8192, 4, 2};
  EXPECT_THROW(check_tile_bytes(tile_bytes({128, 256}, shape), kLimit), DeviceError);
  EXPECT_NO_THROW(check_tile_bytes(kLimit, kLimit));
}

TEST(NpuConvTile, ABufferWithoutRoomForOneRowIsRefused) {
  EXPECT_THROW(plan_tile({100, 64, 4, 2}, 1024), DeviceError);
}

/// The table refuses a kernel whose tile is larger than the device's buffer.
TEST(NpuConvTile, TheRegistryComparesItsBytesWithTheDevice) {
  const std::vector<OpRequest> requests = {
      OpRequest::of<CausalConv1d>({.channels = 8192, .width = 4})};
  const auto choose = [&](std::int64_t limit) {
    return KernelTable::choose(builtin_registry(), {Platform::kSim, "", limit},
                               c10::ScalarType::BFloat16, requests);
  };
  EXPECT_EQ(choose(kLimit).choices().at(0).kernel, "npu.tiled");
  EXPECT_THAT([&] { choose(65536); },
              ThrowsMessage<DeviceError>(AllOf(HasSubstr("npu.tiled: needs"), HasSubstr("65536"))));
}

}  // namespace
}  // namespace heddle::ops::causal_conv1d_npu
