// Linear layers of a few rows with what stands around them, in one launch on the GPU, against fp64
// on the CPU.
#include "ops/linear/few_row_layers.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include "ops/builtin.h"
#include "ops/cuda/fused_support.h"
#include "ops/grouped_low_rank_support.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/swiglu/swiglu.h"

namespace heddle::ops::testing {
namespace {

class GpuFewRowLayers : public GpuFused {};

/// Reference of FewRowLayers, in fp64 on the CPU.
Tensors exact_layers(const FewRowLayers& call) {
  const auto wide = [](const at::Tensor& x) { return x.cpu().to(at::kDouble); };
  at::Tensor x = wide(call.x);
  if (call.norm) {
    const at::Tensor rstd = (x.square().mean(1, true) + call.eps).rsqrt();
    x = x * rstd * (call.norm->offset + wide(call.norm->value));
  }
  Tensors outputs;
  for (const FewRowLayers::Layer& layer : call.layers) {
    at::Tensor y = x.mm(wide(layer.weight).t());
    if (layer.a.defined()) y = y + layer.scaling * x.mm(wide(layer.a).t()).mm(wide(layer.b).t());
    outputs.push_back(call.residual.defined() ? y + wide(call.residual) : y);
  }
  if (!call.is_gated) return outputs;
  return {outputs[0] * outputs[0].sigmoid() * outputs[1]};
}

struct LayersCase {
  std::int64_t rows, depth;
  std::vector<std::int64_t> columns, ranks;  ///< Rank 0: no change.
  bool has_norm, is_gated, has_residual;
};

void expect_layers(const std::vector<LayersCase>& cases) {
  const KernelTable kernels =
      KernelTable::choose(builtin_registry(), {Platform::kCuda}, at::kBFloat16,
                          {any<Linear>(), any<RmsNorm>(), any<Swiglu>()});
  std::uint64_t seed = 900;
  for (const LayersCase& c : cases) {
    SCOPED_TRACE(std::to_string(c.rows) + " rows of " + std::to_string(c.depth) + " to " +
                 std::to_string(c.columns[0]) + ", rank " + std::to_string(c.ranks[0]));
    FewRowLayers call;
    call.x = matrix(c.rows, c.depth, ++seed, 16);
    for (std::size_t i = 0; i < c.columns.size(); ++i) {
      FewRowLayers::Layer layer{matrix(c.columns[i], c.depth, ++seed, 16), {}, {}};
      if (c.ranks[i] > 0) {
        layer.a = matrix(c.ranks[i], c.depth, ++seed, 16);
        layer.b = matrix(c.columns[i], c.ranks[i], ++seed, 16);
        layer.scaling = 0.25 * static_cast<double>(i + 1);
      }
      call.layers.push_back(layer);
    }
    if (c.has_norm) {
      call.norm = NormWeight(randn({c.depth}, at::kBFloat16, ++seed).to(gpu()), 1);
      call.eps = 1e-6;
    }
    if (c.has_residual) call.residual = matrix(c.rows, c.columns[0], ++seed, 16);
    call.is_gated = c.is_gated;
    const Tensors found = few_row_layers(kernels, call), again = few_row_layers(kernels, call),
                  expected = exact_layers(call);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_LT(error(found[i], expected[i]), 0.01) << "output " << i;
      EXPECT_TRUE(identical(found[i].cpu(), again[i].cpu())) << "output " << i;
    }
    // A row's bits do not depend on the other rows, up to what fits the same kernel.
    FewRowLayers first = call;
    const std::int64_t few = c.rows > 16 ? 17 : 1;
    first.x = call.x.narrow(0, 0, few);
    if (c.has_residual) first.residual = call.residual.narrow(0, 0, few);
    EXPECT_TRUE(
        identical(few_row_layers(kernels, first)[0].cpu(), found[0].narrow(0, 0, few).cpu()));
  }
}

TEST_F(GpuFewRowLayers, EqualReference) {
  expect_layers({{1, 1024, {6144, 2048, 16, 16}, {0, 0, 0, 0}, true, false, false},
                 {8, 1024, {4096, 512, 512}, {0, 0, 0}, true, false, false},
                 {1, 2048, {1024}, {0}, false, false, true},
                 {9, 1000, {520}, {0}, false, false, true},
                 {1, 1024, {3584, 3584}, {0, 0}, true, true, false},
                 {16, 72, {1032, 1032}, {0, 0}, false, true, false},
                 {5, 2560, {516, 516}, {0, 0}, true, true, false}});
}

/// Rows of launches so large that the kernel of a batch's rows takes them whatever their number.
constexpr std::int64_t kRowsOfLargeLaunches[] = {1, 2, 3, 8, 15, 16};

TEST_F(GpuFewRowLayers, OfLargeLaunchesEqualReference) {
  for (const std::int64_t rows : kRowsOfLargeLaunches) {
    expect_layers({{rows, 1024, {6144, 2048, 16, 16}, {0, 0, 0, 0}, true, false, false},
                   {rows, 2560, {3000}, {0}, false, false, true},
                   {rows, 9216, {1000}, {0}, true, false, true},
                   {rows, 1024, {3584, 3584}, {0, 0}, true, true, false},
                   {rows, 2560, {9216, 9216}, {0, 0}, true, true, false}});
  }
}

TEST_F(GpuFewRowLayers, OfLargeLaunchesWithChangesEqualReference) {
  for (const std::int64_t rows : kRowsOfLargeLaunches) {
    expect_layers({{rows, 1024, {6144, 2048, 16, 16}, {16, 16, 0, 16}, true, false, false},
                   {rows, 2560, {3000}, {64}, false, false, true},
                   {rows, 1024, {3584, 3584}, {16, 40}, true, true, false}});
  }
}

TEST_F(GpuFewRowLayers, OfABatchEqualReference) {
  expect_layers({{17, 1024, {6144, 2048, 16, 16}, {0, 0, 0, 0}, true, false, false},
                 {64, 1024, {4096, 512, 512}, {0, 0, 0}, true, false, false},
                 {64, 2048, {1024}, {0}, false, false, true},
                 {32, 3584, {1024}, {0}, false, false, true},
                 {40, 1000, {520}, {0}, true, false, true},
                 {64, 1024, {3584, 3584}, {0, 0}, true, true, false},
                 {33, 2560, {9216, 9216}, {0, 0}, true, true, false},
                 {20, 72, {1032, 1032}, {0, 0}, false, true, false},
                 {31, 2560, {516, 516}, {0, 0}, true, true, false},
                 {50, 64, {20000}, {0}, false, false, false}});
}

TEST_F(GpuFewRowLayers, OfABatchWithChangesEqualReference) {
  expect_layers({{64, 1024, {6144, 2048, 16, 16}, {16, 16, 16, 16}, true, false, false},
                 {17, 1024, {4096, 512, 512}, {8, 0, 24}, true, false, false},
                 {33, 3584, {1024}, {16}, false, false, true},
                 {64, 2048, {1024}, {64}, false, false, true},
                 {50, 1000, {520}, {40}, true, false, true},
                 {64, 1024, {3584, 3584}, {16, 16}, true, true, false},
                 {20, 2560, {9216, 9216}, {32, 8}, true, true, false},
                 {30, 72, {516, 516}, {0, 64}, false, true, false},
                 {40, 64, {600, 8}, {16, 0}, true, false, false},
                 {30, 256, {1024, 512, 4, 4}, {16, 16, 16, 16}, true, false, false},
                 {64, 640, {528, 24, 24, 16}, {16, 16, 16, 16}, true, false, false}});
}

TEST_F(GpuFewRowLayers, WithChangesEqualReference) {
  expect_layers({{1, 1024, {6144, 2048, 16, 16}, {16, 16, 16, 16}, true, false, false},
                 {3, 1024, {4096, 512, 512}, {8, 0, 24}, true, false, false},
                 {1, 3584, {1024}, {16}, false, false, true},
                 {11, 2048, {1024}, {64}, false, false, true},
                 {16, 1000, {520}, {40}, true, false, true},
                 {1, 1024, {3584, 3584}, {16, 16}, true, true, false},
                 {16, 1024, {1032, 1032}, {32, 8}, true, true, false},
                 {7, 72, {516, 516}, {0, 64}, false, true, false},
                 {2, 64, {600, 8}, {16, 0}, true, false, false}});
}

/// Rows whose changes stand in tables equal layers of their own: [rows], slots of three ranks.
void expect_slot_layers(const LayersCase& c, const std::vector<std::int64_t>& ranks) {
  SCOPED_TRACE(std::to_string(c.rows) + " rows of " + std::to_string(c.depth));
  const KernelTable kernels =
      KernelTable::choose(builtin_registry(), {Platform::kCuda}, at::kBFloat16,
                          {any<Linear>(), any<RmsNorm>(), any<Swiglu>(), any<GroupedLowRank>()});
  std::vector<std::int64_t> of_row;
  const auto slots = static_cast<std::int64_t>(ranks.size());
  for (std::int64_t i = 0; i < c.rows; ++i) of_row.push_back(i * (slots + 1) / c.rows - 1);
  const SlotCase all =
      SlotCase::of(c.depth, c.columns, ranks, of_row).with([](const at::Tensor& x) {
        return x.to(at::kBFloat16).to(gpu());
      });
  std::uint64_t seed = 1300;
  FewRowLayers call;
  call.x = all.x;
  for (const std::int64_t columns : c.columns)
    call.layers.push_back({matrix(columns, c.depth, ++seed, 16), {}, {}});
  if (c.has_norm) {
    call.norm = NormWeight(randn({c.depth}, at::kBFloat16, ++seed).to(gpu()), 1);
    call.eps = 1e-6;
  }
  if (c.has_residual) call.residual = matrix(c.rows, c.columns[0], ++seed, 16);
  call.is_gated = c.is_gated;
  call.slots = all.slots();
  const Tensors found = few_row_layers(kernels, call), again = few_row_layers(kernels, call);
  ASSERT_FALSE(found.empty());
  for (std::int64_t row = 0; row < c.rows; ++row) {
    // The row alone, with its set's factors as the layers' own.
    FewRowLayers own = call;
    own.slots.reset();
    own.x = call.x.narrow(0, row, 1);
    if (c.has_residual) own.residual = call.residual.narrow(0, row, 1);
    const auto slot = of_row[static_cast<std::size_t>(row)];
    for (std::size_t i = 0; i < own.layers.size() && slot >= 0; ++i) {
      const Tensors& pair = all.factors[i][static_cast<std::size_t>(slot)];
      if (pair.empty()) continue;
      own.layers[i].a = pair[0];
      own.layers[i].b = pair[1];
      own.layers[i].scaling = all.scales[static_cast<std::size_t>(slot)];
    }
    const Tensors expected = exact_layers(own);
    // With few other rows, in the same kernel.
    const std::int64_t few = c.rows > 16 ? 17 : 1, first = std::min(row, c.rows - few);
    const SlotCase alone = all.rows(first, few);
    FewRowLayers in_table = call;
    in_table.x = call.x.narrow(0, first, few);
    if (c.has_residual) in_table.residual = call.residual.narrow(0, first, few);
    in_table.slots = alone.slots();
    in_table.slots->rank = call.slots->rank;
    const Tensors same = few_row_layers(kernels, in_table);
    ASSERT_EQ(same.size(), found.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      const at::Tensor mine = found[i].narrow(0, row, 1);
      EXPECT_LT(error(mine, expected[i]), 0.01) << "row " << row << ", output " << i;
      EXPECT_TRUE(identical(mine.cpu(), again[i].narrow(0, row, 1).cpu())) << row;
      EXPECT_TRUE(identical(mine.cpu(), same[i].narrow(0, row - first, 1).cpu()))
          << "row " << row << ", output " << i;
    }
  }
}

TEST_F(GpuFewRowLayers, WithSlotsEqualReference) {
  expect_slot_layers({1, 1024, {6144, 2048, 16, 16}, {}, true, false, false}, {16});
  expect_slot_layers({8, 1024, {4096, 512, 512}, {}, true, false, false}, {16, 1, 64, 0, 8});
  expect_slot_layers({16, 1024, {1032, 1032}, {}, true, true, false}, {45, 3, 16});
  expect_slot_layers({13, 3584, {1024}, {}, false, false, true}, {26, 16, 128});
  expect_slot_layers({16, 72, {520, 16}, {}, false, false, false},
                     {8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8});
}

/// Rows of one run equal layers of their own, and have the bits that they have in a longer table.
void expect_one_run(const LayersCase& c, std::int64_t rank) {
  SCOPED_TRACE(std::to_string(c.rows) + " rows of " + std::to_string(c.depth) + ", rank " +
               std::to_string(rank));
  const KernelTable kernels =
      KernelTable::choose(builtin_registry(), {Platform::kCuda}, at::kBFloat16,
                          {any<Linear>(), any<RmsNorm>(), any<Swiglu>(), any<GroupedLowRank>()});
  constexpr std::int64_t kSlot = 1;
  const SlotCase all =
      SlotCase::of(c.depth, c.columns, {3, rank},
                   std::vector<std::int64_t>(static_cast<std::size_t>(c.rows), kSlot))
          .with([](const at::Tensor& x) { return x.to(at::kBFloat16).to(gpu()); });
  std::uint64_t seed = 1700;
  FewRowLayers call;
  call.x = all.x;
  for (const std::int64_t columns : c.columns)
    call.layers.push_back({matrix(columns, c.depth, ++seed, 16), {}, {}});
  if (c.has_norm) {
    call.norm = NormWeight(randn({c.depth}, at::kBFloat16, ++seed).to(gpu()), 1);
    call.eps = 1e-6;
  }
  if (c.has_residual) call.residual = matrix(c.rows, c.columns[0], ++seed, 16);
  call.slots = all.slots();
  call.slots->runs = at::cat({call.slots->runs, at::zeros_like(call.slots->runs)});
  const Tensors in_table = few_row_layers(kernels, call);
  call.slots->runs = call.slots->runs.narrow(0, 0, 1);
  const Tensors found = few_row_layers(kernels, call), again = few_row_layers(kernels, call);
  FewRowLayers own = call;
  own.slots.reset();
  for (std::size_t i = 0; i < own.layers.size(); ++i) {
    const Tensors& pair = all.factors[i][kSlot];
    if (pair.empty()) continue;
    own.layers[i].a = pair[0];
    own.layers[i].b = pair[1];
    own.layers[i].scaling = all.scales[kSlot];
  }
  const Tensors expected = exact_layers(own);
  ASSERT_EQ(found.size(), expected.size());
  ASSERT_EQ(in_table.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_LT(error(found[i], expected[i]), 0.01) << "output " << i;
    EXPECT_TRUE(identical(found[i].cpu(), again[i].cpu())) << "output " << i;
    EXPECT_TRUE(identical(found[i].cpu(), in_table[i].cpu())) << "output " << i;
  }
}

TEST_F(GpuFewRowLayers, OfOneRunEqualReference) {
  for (const std::int64_t rows : {1, 2, 5, 8}) {
    for (const std::int64_t rank : {16, 8, 11, 1, 40}) {
      expect_one_run({rows, 2048, {1024}, {}, false, false, true}, rank);
      expect_one_run({rows, 3584, {1024}, {}, true, false, false}, rank);
      expect_one_run({rows, 1000, {520, 24, 16}, {}, true, false, false}, rank);
    }
  }
}

TEST_F(GpuFewRowLayers, OfLargeLaunchesWithSlotsEqualReference) {
  for (const std::int64_t rows : kRowsOfLargeLaunches)
    expect_slot_layers({rows, 1024, {6144, 2048, 16, 16}, {}, true, false, false}, {16, 8, 33});
  expect_slot_layers({16, 1024, {3584, 3584}, {}, true, true, false}, {45, 3, 16});
  expect_slot_layers({13, 3584, {2048}, {}, false, false, true}, {26, 16, 128});
}

TEST_F(GpuFewRowLayers, OfABatchWithSlotsEqualReference) {
  expect_slot_layers({64, 1024, {6144, 2048, 16, 16}, {}, true, false, false}, {16, 16, 8});
  expect_slot_layers({40, 1024, {4096, 512, 512}, {}, true, false, false}, {16, 1, 64, 0, 8});
  expect_slot_layers({33, 1024, {1032, 1032}, {}, true, true, false}, {45, 3, 16});
  expect_slot_layers({64, 3584, {1024}, {}, false, false, true}, {26, 16, 128});
  expect_slot_layers({17, 72, {520, 16}, {}, false, false, false},
                     {8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8});
  expect_slot_layers({30, 256, {1024, 512, 4, 4}, {}, true, false, false}, {16, 16, 16});
  expect_slot_layers({64, 640, {528, 24, 24, 16}, {}, true, false, false}, {16, 16, 16, 16});
}

}  // namespace
}  // namespace heddle::ops::testing
