// Low-rank changes of several sets at once, against their definition for one set after the other.
#include "ops/grouped_low_rank/grouped_low_rank.h"

#include <ATen/ops/mm.h>

#include "ops/grouped_low_rank_support.h"

namespace heddle::ops::testing {
namespace {

KernelTable table(const std::string& name, c10::ScalarType dtype) {
  return table_of(OpRequest::of<GroupedLowRank>(), name, dtype);
}

/// y = dy + scaling (x a^T) b^T and its gradients, written down for each change alone.
GroupedResult defined(const GroupedCase& c, double first) {
  GroupedResult result;
  for (const at::Tensor& dy : c.dy) result.outputs.push_back(dy.clone());
  result.dx = c.x.clone();
  for (const LowRankRows& rows : c.groups) {
    const auto own = [&](const at::Tensor& all) { return all.narrow(0, rows.first, rows.rows); };
    for (const auto& change : rows.changes) {
      const at::Tensor x = own(c.x), dy = own(c.dy[change.layer]);
      own(result.outputs[change.layer])
          .add_(at::mm(at::mm(x, change.a.t()), change.b.t()), change.scaling);
      own(result.dx).add_(at::mm(at::mm(dy, change.b), change.a), change.scaling);
      result.d_b.push_back(at::mm(dy.t(), at::mm(x, change.a.t())) * change.scaling + first);
      result.d_a.push_back(at::mm(at::mm(dy, change.b).t(), x) * change.scaling + first);
    }
  }
  return result;
}

TEST(GroupedLowRank, EqualsEachSetAlone) {
  const GroupedCase exact = GroupedCase::of(48, {64, 24, 8}, {0, 1, 37, 5},
                                            {{8, 8, 8}, {3, 0, 16}, {0, 0, 0}, {26, 1, 64}});
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const GroupedCase c = exact.with([&](const at::Tensor& x) { return x.to(dtype); });
    const KernelTable kernels = table("reference", dtype);
    for (const double first : {0.0, 3.0}) {
      const Tensors found = run(kernels.get<GroupedLowRank>(), c, first).all(),
                    expected = defined(exact, first).all();
      for (std::size_t i = 0; i < found.size(); ++i)
        EXPECT_TRUE(close(found[i], expected[i], 2 * tolerance_of(dtype))) << dtype << " " << i;
    }
  }
}

TEST(GroupedLowRank, WritesOverWhatIsThereUnlessItAdds) {
  const GroupedCase c = GroupedCase::of(16, {8}, {4, 0}, {{3}, {5}});
  const KernelTable kernels = table("reference", at::kDouble);
  const Tensors fresh = run(kernels.get<GroupedLowRank>(), c).all(), expected = defined(c, 0).all();
  for (std::size_t i = 0; i < fresh.size(); ++i)
    EXPECT_TRUE(close(fresh[i], expected[i], 1e-12)) << i;
}

TEST(GroupedLowRank, SlotsEqualEachRowAlone) {
  const SlotCase exact = SlotCase::of(48, {64, 24, 7}, {8, 3, 0, 64, 1},
                                      {0, 0, 0, -1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4, -1, 0});
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const SlotCase c = exact.with([&](const at::Tensor& x) { return x.to(dtype); });
    const Tensors found = run(table("reference", dtype).get<GroupedLowRank>(), c),
                  expected = exact.defined();
    for (std::size_t i = 0; i < found.size(); ++i)
      EXPECT_TRUE(close(found[i], expected[i], 2 * tolerance_of(dtype))) << dtype << " " << i;
  }
}

TEST(GroupedLowRank, SlotsOfGatedLayers) {
  const SlotCase c = SlotCase::of(16, {24, 24}, {3, 0, 8}, {0, -1, 1, 2, 2});
  const Tensors found = run(table("reference", at::kDouble).get<GroupedLowRank>(), c),
                expected = c.defined();
  ASSERT_EQ(found.size(), 3U);
  EXPECT_TRUE(close(found[2], expected[2], 1e-6));
}

TEST(GroupedLowRank, SlotsWithoutRowsChangeNothing) {
  const SlotCase c = SlotCase::of(16, {8}, {4}, {-1, -1});
  const Tensors found = run(table("reference", at::kDouble).get<GroupedLowRank>(), c);
  EXPECT_TRUE(identical(found[0], c.y[0]));
}

TEST(GroupedLowRank, LeavesOutFactorsThatNobodyAsksFor) {
  const GroupedCase c = GroupedCase::of(16, {8, 8}, {4}, {{3, 4}});
  const GroupedLowRank::Functions f = table("reference", at::kDouble).get<GroupedLowRank>();
  const at::Tensor lows = f.lows(c.x, c.groups);
  const at::Tensor asked = at::full({8, 4}, NAN, c.x.options());
  f.d_lows_and_gradients_of_b(c.dy, lows, c.groups, {{{}, false}, {asked, false}});
  EXPECT_TRUE(close(asked, defined(c, 0).d_b[1], 1e-12));
}

}  // namespace
}  // namespace heddle::ops::testing
