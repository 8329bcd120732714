// Experts that share the factor on the side of the hidden states, against a pair for each expert.
#include <ATen/TensorOperators.h>

#include <fmt/format.h>

#include <functional>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "ops/builtin.h"
#include "ops/moe/moe.h"
#include "ops/operator_support.h"

namespace heddle::ops::testing {
namespace {

constexpr std::int64_t kHidden = 16, kWidth = 24, kTopK = 3;

struct SetShape {
  std::int64_t tokens;
  bool gate_up, down, is_shared;
};

/// x, weights and the factors of all sets; and a call with them.
struct Sets {
  std::int64_t experts;
  std::vector<SetShape> shapes;
  at::Tensor chosen, gate_up, down;
  Tensors inputs;
  std::optional<std::int64_t> assignments = {};

  Sets(std::int64_t expert_count, std::vector<SetShape> sets, c10::ScalarType dtype)
      : experts(expert_count), shapes(std::move(sets)) {
    const std::int64_t tokens =
        std::accumulate(shapes.begin(), shapes.end(), std::int64_t{0},
                        [](std::int64_t sum, const SetShape& s) { return sum + s.tokens; });
    const MoeRouting routing = moe_route(randn({tokens, experts}, dtype, 1), kTopK, true);
    chosen = routing.experts;
    gate_up = randn({experts, 2 * kWidth, kHidden}, dtype, 3) * 0.3;
    down = randn({experts, kHidden, kWidth}, dtype, 4) * 0.3;
    inputs = {randn({tokens, kHidden}, dtype, 2), routing.weights};
    int seed = 10;
    const auto add = [&](std::int64_t count, std::int64_t rows, std::int64_t columns) {
      inputs.push_back(randn({count, rows, columns}, dtype, ++seed) * 0.3);
    };
    for (std::size_t s = 0; s < shapes.size(); ++s) {
      const std::int64_t rank = 5 + static_cast<std::int64_t>(s);
      const std::int64_t outer = shapes[s].is_shared ? 1 : experts;
      if (shapes[s].gate_up) {
        add(outer, rank, kHidden);
        add(experts, 2 * kWidth, rank);
      }
      if (shapes[s].down) {
        add(experts, rank + 1, kWidth);
        add(outer, kHidden, rank + 1);
      }
    }
  }

  /// A call; `as_pairs`: with a factor for each expert, equal ones where they share it.
  std::function<Tensors(const Tensors&)> run(const KernelTable& kernels, bool as_pairs) const {
    return [this, &kernels, as_pairs](const Tensors& in) {
      const auto factor = [&](std::size_t i) {
        return as_pairs ? in[i].expand({experts, -1, -1}).contiguous() : in[i];
      };
      std::vector<ExpertChanges> changes;
      std::size_t next = 2;
      for (const SetShape& shape : shapes) {
        ExpertChanges change{{}, {}, shapes.size() > 1 ? shape.tokens : -1};
        for (auto [is_there, into] :
             {std::pair{shape.gate_up, &change.gate_up}, std::pair{shape.down, &change.down}}) {
          if (!is_there) continue;
          into->down = factor(next++);
          into->up = factor(next++);
        }
        changes.push_back(change);
      }
      return Tensors{
          moe_experts(kernels, {in[0], in[1], chosen, gate_up, down, changes, assignments})};
    };
  }
};

void expect_equal(const Sets& sets, const KernelTable& kernels, double tolerance) {
  EXPECT_TRUE(close(sets.run(kernels, false)(sets.inputs)[0],
                    sets.run(kernels, true)(sets.inputs)[0], tolerance));
  const Tensors actual = gradients_of(sets.run(kernels, false), sets.inputs),
                expected = gradients_of(sets.run(kernels, true), sets.inputs);
  for (std::size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(close(actual[i], expected[i], 10 * tolerance)) << "gradient " << i;
}

KernelTable table(const char* name, c10::ScalarType dtype) {
  return table_of(any<MoeExperts>(), name, dtype);
}

TEST(MoeExperts, SharedFactorsEqualPairsWithTheSameFactor) {
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    // With forty experts and few tokens many are empty.
    for (const std::int64_t experts : {3, 40}) {
      SCOPED_TRACE(fmt::format("{} {}", name, experts));
      expect_equal({experts, {{37, true, true, true}}, at::kDouble}, kernels, 1e-12);
      expect_equal({experts, {{1, true, true, true}}, at::kDouble}, kernels, 1e-12);
      expect_equal({experts, {{20, true, false, true}}, at::kDouble}, kernels, 1e-12);
      expect_equal({experts, {{20, false, true, true}}, at::kDouble}, kernels, 1e-12);
    }
  }
}

TEST(MoeExperts, SetsThatShareFactorsStandBesideSetsThatDoNot) {
  const std::vector<SetShape> mixed = {{20, true, true, true},  {9, true, true, false},
                                       {1, true, true, true},   {14, false, false, false},
                                       {33, true, false, true}, {6, false, true, true},
                                       {5, true, false, false}};
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    for (const std::int64_t experts : {3, 40}) {
      SCOPED_TRACE(fmt::format("{} {}", name, experts));
      expect_equal({experts, mixed, at::kDouble}, kernels, 1e-12);
    }
  }
}

TEST(MoeExperts, GradientsOfSharedFactorsMatchFiniteDifferences) {
  const Sets one(4, {{6, true, true, true}}, at::kDouble);
  const Sets two(4, {{3, true, true, true}, {2, true, true, false}}, at::kDouble);
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    EXPECT_TRUE(gradients_match(one.run(kernels, false), one.inputs)) << name;
    EXPECT_TRUE(gradients_match(two.run(kernels, false), two.inputs)) << name;
  }
}

TEST(MoeExperts, KernelEqualsReferenceWithSharedFactors) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    const KernelTable kernel = table(kOwn, dtype), reference = table("reference", at::kDouble);
    // Not every kernel takes several sets.
    std::vector<SetShape> shapes = {{65, true, true, true}};
    if (kernel.get<MoeExperts>().takes_sets)
      shapes.insert(shapes.end(), {{30, true, true, false}, {64, true, true, true}});
    const Sets sets(40, shapes, dtype);
    Sets wide = sets;
    for (at::Tensor* const x : {&wide.gate_up, &wide.down}) *x = x->to(at::kDouble);
    for (at::Tensor& x : wide.inputs) x = x.to(at::kDouble);
    const double tolerance = dtype == at::kBFloat16 ? 3e-2 : 2 * tolerance_of(dtype);
    EXPECT_TRUE(close(sets.run(kernel, false)(sets.inputs)[0],
                      wide.run(reference, false)(wide.inputs)[0], tolerance));
    const Tensors actual = gradients_of(sets.run(kernel, false), sets.inputs),
                  again = gradients_of(sets.run(kernel, false), sets.inputs),
                  expected = gradients_of(wide.run(reference, false), wide.inputs);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(close(actual[i], expected[i], tolerance)) << i << " " << at::toString(dtype);
      EXPECT_TRUE(identical(actual[i], again[i])) << i;
    }
  }
}

TEST(MoeExperts, AssignmentsToNoExpertHaveNoPartInSharedFactors) {
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    for (const double share : {0.5, 0.0}) {
      Sets sets(6, {{33, true, true, true}}, at::kDouble);
      const at::Tensor is_kept =
          (randn(sets.chosen.sizes(), at::kFloat, 9).sigmoid() < share).to(at::kLong);
      sets.chosen = sets.chosen * is_kept + 6 * (1 - is_kept);
      sets.assignments = is_kept.sum().item().toLong();
      SCOPED_TRACE(fmt::format("{} {}", name, *sets.assignments));
      expect_equal(sets, kernels, 1e-12);
    }
  }
}

TEST(MoeExperts, OneFactorOfAPairAloneIsShared) {
  const KernelTable kernels = table("reference", at::kDouble);
  Sets sets(4, {{6, true, true, true}}, at::kDouble);
  sets.run(kernels, false)(sets.inputs);
  for (const std::size_t factor : {3, 4}) {
    Tensors wrong = sets.inputs;
    wrong[factor] = wrong[factor].narrow(0, 0, 1);
    EXPECT_THROW(sets.run(kernels, false)(wrong), c10::Error) << factor;
  }
}

}  // namespace
}  // namespace heddle::ops::testing
