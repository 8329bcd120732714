// Experts in 8-bit floats against the reference in fp64 on the same values.
#include "ops/moe/frozen_experts.h"

#include <ATen/TensorOperators.h>

#include <optional>
#include <utility>

#include "ops/cuda/fused_support.h"
#include "ops/moe/moe.h"

namespace heddle::ops::testing {
namespace {

/// One layer's. Rows of up to 2,048 go through kernels of different widths.
struct Sizes {
  std::int64_t hidden = 384, width = 128;
};

/// Assignments of tokens to k experts each; a share of them to any at all.
struct Load {
  std::int64_t tokens, k, experts;
  double share;
};

class GpuFrozenExperts : public GpuFused {
 protected:
  void SetUp() override {
    GpuFused::SetUp();
    if (IsSkipped()) return;
    choose({});
  }
  void choose(const Sizes& sizes) {
    experts_ = table_of(OpRequest::of<MoeExperts>({4, 2, sizes.hidden, sizes.width}),
                        "cuda.sm90.grouped", at::kBFloat16, {Platform::kCuda});
    storage_ = table_of(OpRequest::of<FrozenExperts>({4, 2, sizes.hidden, sizes.width}), "cuda.fp8",
                        at::kBFloat16, {Platform::kCuda});
  }
  void expect_products(const Sizes& sizes, const std::vector<Load>& loads);
  void lay(const at::Tensor& weight) const { storage_.get<FrozenExperts>().lay(weight); }

  KernelTable experts_, storage_;
};

/// Matrices that differ in scale, the first one zero.
at::Tensor weights_of(std::int64_t experts, std::int64_t out, std::int64_t in, std::uint64_t seed) {
  at::Tensor weight = randn({experts, out, in}, at::kFloat, seed);
  for (std::int64_t e = 0; e < experts; ++e) weight[e] *= 0.02 * static_cast<double>(e % 7);
  return weight.to(at::kBFloat16);
}

/// The values that lie beside a weight.
at::Tensor values_of(const at::Tensor& weight) {
  const EightBitExperts* const beside = experts_beside(weight);
  return beside->values.cpu().to(at::kDouble) *
         beside->scales.cpu().to(at::kDouble).unsqueeze(1).unsqueeze(2);
}

double relative_error(const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor wanted = expected.cpu().to(at::kDouble);
  return ((actual.cpu().to(at::kDouble) - wanted).norm() / wanted.norm()).item().toDouble();
}

/// Frees the memory of a weight, as its owner does: nothing may read it.
void release(const at::Tensor& weight) {
  c10::StorageImpl* const storage = weight.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap({nullptr, storage->device()});
  storage->set_nbytes(0);
}

TEST_F(GpuFrozenExperts, LieBesideTheirWeight) {
  const at::Tensor weight = weights_of(32, 2 * Sizes().width, Sizes().hidden, 1).to(gpu());
  EXPECT_EQ(experts_beside(weight), nullptr);
  EXPECT_EQ(bytes_beside(weight), 0);
  lay(weight);
  EXPECT_LT(relative_error(values_of(weight), weight), 0.03);
  EXPECT_GT(relative_error(values_of(weight), weight), 0.01);
  EXPECT_EQ(values_of(weight)[0].abs().max().item().toDouble(), 0);
  EXPECT_EQ(bytes_beside(weight), weight.numel() + 32 * 4);
  EXPECT_EQ(experts_beside(weight.detach()), experts_beside(weight));
}

void GpuFrozenExperts::expect_products(const Sizes& sizes, const std::vector<Load>& loads) {
  choose(sizes);
  const auto [hidden, width] = sizes;
  for (const auto& [tokens, k, experts, share] : loads) {
    SCOPED_TRACE(::testing::Message() << hidden << " x " << width << ", " << tokens << " tokens, "
                                      << experts << " experts, " << share);
    const at::Tensor gate_up = weights_of(experts, 2 * width, hidden, 3).to(gpu()),
                     down = weights_of(experts, hidden, width, 4).to(gpu());
    for (const at::Tensor& weight : {gate_up, down}) {
      lay(weight);
      release(weight);
    }
    const MoeRouting routing = moe_route(randn({tokens, experts}, at::kDouble, 1), k, true);
    at::Tensor chosen = routing.experts;
    std::optional<std::int64_t> assignments;
    if (share < 1) {
      const at::Tensor is_none = randn({tokens, k}, at::kDouble, 9).sigmoid() >= share;
      chosen = chosen.masked_fill(is_none, experts);
      assignments = tokens * k - is_none.sum().item().toLong();
    }
    const KernelTable reference = table_of(any<MoeExperts>(), "reference", at::kDouble);
    const auto run = [&](const KernelTable& kernels, const at::Tensor& some, const at::Tensor& a,
                         const at::Tensor& b) {
      return [&kernels, some, a, b, assignments](const Tensors& x) {
        const auto [y, same] =
            moe_experts_branch(kernels, {x[0], x[1], some, a, b, {}, assignments});
        return Tensors{y, same * 0.5};
      };
    };
    Tensors in = {randn({tokens, hidden}, at::kBFloat16, 2), routing.weights.to(at::kBFloat16)};
    const Tensors gpu_in = {in[0].to(gpu()), in[1].to(gpu())};
    for (at::Tensor& x : in) x = x.to(at::kDouble);
    const auto on_cpu = run(reference, chosen, values_of(gate_up), values_of(down));
    const auto on_gpu = run(experts_, chosen.to(gpu()), gate_up, down);
    const at::Tensor y = on_gpu(gpu_in)[0];
    if (tokens == 0) {
      EXPECT_EQ(y.numel(), 0);
      continue;
    }
    const Tensors actual = gradients_of(on_gpu, gpu_in), expected = gradients_of(on_cpu, in),
                  again = gradients_of(on_gpu, gpu_in);
    for (std::size_t i = 0; i < 2; ++i)
      EXPECT_TRUE(identical(actual[i].cpu(), again[i].cpu())) << "gradient " << i;
    if (share == 0) {
      EXPECT_EQ(y.abs().max().item().toDouble(), 0);
      continue;
    }
    EXPECT_LT(relative_error(y, on_cpu(in)[0]), 0.05);
    for (std::size_t i = 0; i < 2; ++i)
      EXPECT_LT(relative_error(actual[i], expected[i]), i == 1 && tokens < 100 ? 0.3 : 0.08)
          << "gradient " << i;  // those of a few weights are sums that cancel
  }
}

// Experts without a row, of a few, and of several tiles; with assignments to no expert.
TEST_F(GpuFrozenExperts, AreMultipliedInPlaceOfTheirWeight) {
  expect_products({}, {{0, 2, 4, 1.0},
                       {5, 1, 3, 1.0},
                       {333, 4, 32, 1.0},
                       {1100, 2, 3, 1.0},
                       {333, 4, 32, 0.5},
                       {9, 1, 3, 0.0}});
}

// SwiGLU and its gradient hold rows in as many threads as they need; the longest row is the last.
TEST_F(GpuFrozenExperts, TakeEachWidth) {
  for (const Sizes& sizes : {Sizes{256, 384}, {384, 640}, {128, 1152}, {640, 512}, {128, 2048}})
    expect_products(sizes, {{333, 4, 32, 1.0}, {700, 2, 3, 0.5}});
}

TEST_F(GpuFrozenExperts, AreRefusedByOtherProductsAndWithAdapters) {
  const at::Tensor gate_up = weights_of(4, 2 * Sizes().width, Sizes().hidden, 3).to(gpu()),
                   down = weights_of(4, Sizes().hidden, Sizes().width, 4).to(gpu()),
                   x = randn({8, Sizes().hidden}, at::kBFloat16, 2).to(gpu());
  lay(gate_up);
  lay(down);
  const MoeRouting routing = moe_route(randn({8, 4}, at::kBFloat16, 1), 2, true);
  MoeExperts::Inputs in{x, routing.weights.to(gpu()), routing.experts.to(gpu()), gate_up, down};
  const KernelTable library =
      table_of(any<MoeExperts>(), "cuda.grouped_mm", at::kBFloat16, {Platform::kCuda});
  EXPECT_THROW(moe_experts(library, in), c10::Error);
  moe_experts(experts_, in);
  in.changes = {{{randn({4, 8, Sizes().hidden}, at::kBFloat16, 5).to(gpu()),
                  randn({4, 2 * Sizes().width, 8}, at::kBFloat16, 6).to(gpu())},
                 {}}};
  EXPECT_THROW(moe_experts(experts_, in), c10::Error);
}

}  // namespace
}  // namespace heddle::ops::testing
