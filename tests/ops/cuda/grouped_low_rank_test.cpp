// Low-rank changes of several sets at once on the GPU, against the reference in fp64 on the CPU.
#include "ops/grouped_low_rank/grouped_low_rank.h"

#include "ops/cuda/fused_support.h"
#include "ops/grouped_low_rank_support.h"

namespace heddle::ops::testing {
namespace {

class GpuGroupedLowRank : public GpuFused {
 protected:
  static KernelTable table(const std::string& name, c10::ScalarType dtype, const Target& device) {
    return table_of(OpRequest::of<GroupedLowRank>(), name, dtype, device);
  }

  /// The kernel's results equal those in double, and their own bits a second time.
  static void expect_results(const GroupedCase& exact, std::int64_t gap = 16) {
    const KernelTable gpu_table = table("cuda.sm90_grouped", at::kBFloat16, {Platform::kCuda});
    const KernelTable cpu_table = table("reference", at::kDouble, {});
    const GroupedCase rounded =
        exact.with([](const at::Tensor& x) { return x.to(at::kBFloat16).to(at::kDouble); });
    const GroupedCase c =
        exact.with([](const at::Tensor& x) { return x.to(at::kBFloat16).to(gpu()); });
    GroupedCase gapped = c;
    gapped.x = with_poisoned_gaps(c.x, gap);
    for (at::Tensor& dy : gapped.dy) dy = with_poisoned_gaps(dy, gap);
    for (const std::optional<double> first : {std::optional<double>(), std::optional<double>(3)}) {
      const Tensors found = run(gpu_table.get<GroupedLowRank>(), gapped, first).all(),
                    again = run(gpu_table.get<GroupedLowRank>(), gapped, first).all(),
                    expected = run(cpu_table.get<GroupedLowRank>(), rounded, first).all();
      for (std::size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(close(found[i].cpu(), expected[i], 1e-2)) << i;
        EXPECT_TRUE(identical(found[i].cpu(), again[i].cpu())) << i;
      }
    }
  }
};

TEST_F(GpuGroupedLowRank, RaggedAndEmptyRowsEqualReference) {
  expect_results(GroupedCase::of(
      1032, {264, 64, 16, 8}, {0, 1, 300, 129, 7},
      {{8, 8, 8, 8}, {26, 0, 45, 1}, {64, 16, 16, 100}, {0, 0, 0, 0}, {40, 32, 24, 8}}));
}

TEST_F(GpuGroupedLowRank, LongSumsEqualReference) {
  // Few tiles: sums are cut along their depth.
  expect_results(GroupedCase::of(4104, {9216}, {70, 3}, {{24}, {45}}, 0));
  expect_results(GroupedCase::of(64, {72}, {3000}, {{12}}));
}

TEST_F(GpuGroupedLowRank, MoreSetsThanALaunchTakes) {
  std::vector<std::int64_t> rows;
  std::vector<std::vector<std::int64_t>> ranks;
  for (std::int64_t s = 0; s < 40; ++s) {
    rows.push_back(s % 5);
    ranks.push_back({1 + s % 20, 8, s % 3});
  }
  expect_results(GroupedCase::of(64, {128, 40, 8}, rows, ranks));
}

TEST_F(GpuGroupedLowRank, LeavesOddWidthsToTheLibrary) {
  expect_results(GroupedCase::of(37, {13, 64}, {5, 9}, {{3, 8}, {0, 4}}), 3);
}

}  // namespace
}  // namespace heddle::ops::testing
