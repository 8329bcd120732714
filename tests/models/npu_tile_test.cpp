#include <gtest/gtest.h>

#include <cstdio>

#include "device/npu_chip.h"
#include "models/kernel_requests.h"
#include "models/registry.h"
#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/causal_conv1d/npu/tile.h"

namespace heddle::models {
namespace {

/// The convolutions of every published size at 128k tokens, the sequence divided over 1 to 8 ranks:
/// by heads (all tokens, some channels) and by segments (some tokens, all channels).
TEST(NpuConvTile, AcceptsEveryPublishedSizeAt128kTokens) {
  using namespace ops::causal_conv1d_npu;
  constexpr std::int64_t kTokens = 131072;
  int plans = 0, published = 0, small = 0;
  for (const std::string& name : preset_names()) {
    const Config config = preset(name);
    if (config.gated_delta_net() == nullptr) continue;
    (name.starts_with("small-") ? small : published) += 1;
    for (std::int64_t sp = 1; sp <= 8; ++sp) {
      Degrees degrees;
      if (config.gated_delta_net()->num_key_heads % sp == 0) degrees.ulysses = sp;
      for (const ops::OpRequest& request : kernel_requests(config, degrees)) {
        if (request.op != ops::CausalConv1d::kName) continue;
        const auto& dims = *static_cast<const ops::CausalConv1d::Dims*>(request.dims.get());
        for (const std::int64_t tokens : {kTokens, (kTokens + sp - 1) / sp}) {
          for (const std::int64_t element_bytes : {2, 4}) {
            const ConvShape shape{tokens, dims.channels, dims.width, element_bytes};
            const Tile tile = plan_tile(shape, device::kUnifiedBufferBytes);
            EXPECT_LE(tile_bytes(tile, shape), device::kUnifiedBufferBytes) << name << " sp " << sp;
            EXPECT_GE(tile.tokens * tile.channels, 4096) << name << " sp " << sp;
            ++plans;
          }
        }
      }
    }
  }
  EXPECT_EQ(published, 9);
  EXPECT_EQ(plans, 8 * 2 * 2 * (published + small));
  std::printf("%d plans for %d published sizes\n", plans, published);
}

}  // namespace
}  // namespace heddle::models
