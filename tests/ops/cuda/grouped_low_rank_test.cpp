// Low-rank changes of several sets at once on the GPU, against the reference in fp64 on the CPU.
#include "ops/grouped_low_rank/grouped_low_rank.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "ops/cuda/fused_support.h"
#include "ops/grouped_low_rank/in_products.h"
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

TEST_F(GpuGroupedLowRank, RowsUpToATileEqualReference) {
  // The gradients of B are made beside the lows', of ranks in one and two tiles of columns.
  expect_results(
      GroupedCase::of(264, {1032, 64, 8}, {64, 128, 0, 17, 1},
                      {{8, 16, 32}, {64, 24, 1}, {8, 8, 8}, {100, 0, 31}, {33, 65, 128}}));
}

TEST_F(GpuGroupedLowRank, FewRowsEqualReference) {
  // Up to 32 rows and up to 64 have tiles of their own; deep sums are cut over a cluster.
  expect_results(GroupedCase::of(2568, {9216, 264, 8}, {16, 1, 32, 0, 7},
                                 {{8, 64, 8}, {45, 1, 0}, {64, 100, 16}, {8, 8, 8}, {26, 33, 65}}));
  expect_results(
      GroupedCase::of(1032, {4104, 72}, {64, 33, 5, 48}, {{64, 8}, {17, 130}, {32, 0}, {7, 40}}));
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

/// The kernels' outputs equal those in double, their own bits a second time, and those of every row
/// alone.
void expect_slots(const SlotCase& exact) {
  const auto rounded = [](const at::Tensor& x) { return x.to(at::kBFloat16).to(at::kDouble); };
  const SlotCase c = exact.with([](const at::Tensor& x) { return x.to(at::kBFloat16).to(gpu()); });
  const KernelTable kernels = table_of(OpRequest::of<GroupedLowRank>(), "cuda.sm90_grouped",
                                       at::kBFloat16, {Platform::kCuda});
  const GroupedLowRank::Functions& f = kernels.get<GroupedLowRank>();
  const Tensors found = run(f, c), again = run(f, c), expected = exact.with(rounded).defined();
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(close(found[i].cpu(), expected[i], 1e-2)) << i;
    EXPECT_TRUE(identical(found[i].cpu(), again[i].cpu())) << i;
  }
  for (std::int64_t row = 0; row < c.x.size(0); row += 5) {
    const Tensors alone = run(f, c.rows(row, 1));
    for (std::size_t i = 0; i < found.size(); ++i)
      EXPECT_TRUE(identical(alone[i].cpu(), found[i].narrow(0, row, 1).cpu())) << row << " " << i;
  }
}

/// Rows of so many sets, one after another, some of none.
std::vector<std::int64_t> rows_of_slots(std::int64_t rows, std::int64_t slots) {
  std::vector<std::int64_t> of_row;
  for (std::int64_t i = 0; i < rows; ++i) of_row.push_back(i * (slots + 1) / rows - 1);
  return of_row;
}

TEST_F(GpuGroupedLowRank, SlotsEqualReference) {
  expect_slots(SlotCase::of(1024, {6144, 2048, 16, 16}, {16, 8, 64, 1, 0}, rows_of_slots(64, 5)));
  expect_slots(SlotCase::of(1000, {264, 72, 7}, {26, 16, 128}, rows_of_slots(40, 3)));
  expect_slots(SlotCase::of(1024, {3584, 3584}, {16, 64, 7}, rows_of_slots(33, 3)));
  expect_slots(SlotCase::of(64, {37, 37}, {5, 16}, rows_of_slots(18, 2)));
  expect_slots(SlotCase::of(3584, {1024}, {16}, rows_of_slots(17, 1)));
  expect_slots(SlotCase::of(64, {72, 8}, {2, 3, 5, 12, 45}, rows_of_slots(97, 5)));
}

/// Products of the layers with the changes as further terms, and of a residual below one layer.
class GpuGroupedTerms : public GpuFused {
 protected:
  static at::Tensor rounded(const at::Tensor& x) { return x.to(at::kBFloat16).to(at::kDouble); }
  static at::Tensor moved(const at::Tensor& x) { return x.to(at::kBFloat16).to(gpu()); }

  static void expect_results(const GroupedCase& exact, bool has_residual) {
    const KernelTable linear = table_of(any<Linear>(), "cuda.sm90_or_cublas", at::kBFloat16,
                                        Target{Platform::kCuda}),
                      grouped = table_of(OpRequest::of<GroupedLowRank>(), "cuda.sm90_grouped",
                                         at::kBFloat16, Target{Platform::kCuda});
    const GroupedLowRank::Functions reference =
        table_of(OpRequest::of<GroupedLowRank>(), "reference", at::kDouble, Target{})
            .get<GroupedLowRank>();
    const GroupedCase in_double = exact.with(rounded), c = exact.with(moved);
    std::vector<Products> sums;
    Products terms, terms_in_double;
    Tensors expected;
    const at::Tensor residual =
        has_residual ? randn({c.rows, c.columns[0]}, at::kDouble, 77) : at::Tensor();
    for (std::size_t i = 0; i < c.columns.size(); ++i) {
      const at::Tensor weight = randn({c.columns[i], c.width}, at::kDouble, 300 + i);
      sums.push_back({{c.x, moved(weight)}});
      terms.push_back({c.dy[i], moved(weight)});
      terms_in_double.push_back({in_double.dy[i], rounded(weight)});
      expected.push_back(at::mm(in_double.x, rounded(weight).t()));
      if (has_residual) expected[i].add_(rounded(residual));
    }
    const at::Tensor lows_in_double = reference.lows(in_double.x, in_double.groups);
    reference.add_outputs(expected, lows_in_double, in_double.groups);
    const auto& functions = grouped.get<GroupedLowRank>();
    const at::Tensor lows = functions.lows(c.x, c.groups),
                     d_lows = functions.d_lows_and_gradients_of_b(c.dy, lows, c.groups, no_sums(c));
    const auto outputs = [&] {
      return outputs_with_lows(linear.get<Linear>(), sums,
                               has_residual ? moved(residual) : at::Tensor(), lows, c.groups);
    };
    const Tensors found = outputs(), again = outputs();
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(close(found[i].cpu(), expected[i], 1e-2)) << i;
      EXPECT_TRUE(identical(found[i].cpu(), again[i].cpu())) << i;
    }
    at::Tensor dx = at::zeros({c.rows, c.width}, at::kDouble);
    for (const auto& [dy, weight, place] : terms_in_double) dx.add_(at::mm(dy, weight));
    reference.add_input_gradient(
        dx,
        reference.d_lows_and_gradients_of_b(in_double.dy, lows_in_double, in_double.groups,
                                            no_sums(in_double)),
        in_double.groups);
    const at::Tensor found_dx =
        input_gradient_with_lows(linear.get<Linear>(), terms, d_lows, c.groups);
    ASSERT_TRUE(found_dx.defined());
    EXPECT_TRUE(close(found_dx.cpu(), dx, 1e-2));
  }
};

TEST_F(GpuGroupedTerms, RaggedAndEmptyRowsEqualReference) {
  // Segments begin and end inside tiles of 128 and 256 rows.
  expect_results(
      GroupedCase::of(
          320, {264, 64, 16, 520}, {300, 0, 1, 513, 130},
          {{8, 8, 8, 8}, {16, 8, 8, 8}, {32, 0, 64, 8}, {64, 16, 16, 72}, {0, 0, 24, 0}}),
      /*has_residual=*/false);
}

TEST_F(GpuGroupedTerms, OntoAResidual) {
  expect_results(GroupedCase::of(520, {2560}, {256, 512, 100}, {{16}, {64}, {8}}, 0),
                 /*has_residual=*/true);
}

TEST_F(GpuGroupedLowRank, LeavesOddWidthsToTheLibrary) {
  expect_results(GroupedCase::of(37, {13, 64}, {5, 9}, {{3, 8}, {0, 4}}), 3);
}

}  // namespace
}  // namespace heddle::ops::testing
