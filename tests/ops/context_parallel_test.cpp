// Computations of the ranks along cp against one rank that has all tokens. The ranks are
// threads of this process.
#include "ops/context_parallel/context_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/sigmoid.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "comm/ranks.h"
#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/operator_support.h"

namespace heddle::ops {
namespace {

using testing::any;
using testing::close;
using testing::randn;

struct Layout {
  std::vector<std::int32_t> lengths;
  std::int64_t ranks;
};

const std::vector<Layout> kLayouts = {
    {{96}, 2},                // one sequence on every rank
    {{130}, 3},               // segments of unequal length
    {{40, 24}, 2},            // an end on a boundary
    {{5, 59, 17, 3}, 2},      // fragments inside segments
    {{33, 1, 70, 2, 20}, 4},  // sequences over several segments and inside one
    {{7, 7, 7, 7, 7, 7}, 3},  // none longer than a segment
    {{8, 8, 8, 8}, 2},        // none crosses
    {{11}, 5},                // segments shorter than the convolution
    {{61, 1}, 2},             // one token at the end
    {{3, 90}, 4},
};

std::vector<std::int32_t> boundaries(const Layout& layout) {
  std::vector<std::int32_t> cu = {0};
  for (const std::int32_t n : layout.lengths) cu.push_back(cu.back() + n);
  return cu;
}

/// The rows of a rank's tokens, in its order.
at::Tensor share(const at::Tensor& x, const ContextPlan& plan, std::int64_t rank) {
  std::vector<at::Tensor> parts;
  for (const std::int64_t j : plan.held(rank))
    parts.push_back(x.narrow(0, plan.begin(j), plan.end(j) - plan.begin(j)));
  return at::cat(parts);
}

using Whole = std::function<at::Tensor(const Tensors& by_token, const Tensors& shared)>;
using Local = std::function<at::Tensor(const Tensors& by_token, const Tensors& shared,
                                       const ContextParallel&)>;

/// Compares output and gradients of `local` on all ranks with those of `whole`.
void compare(ContextMethod method, const Layout& layout, const Tensors& by_token,
             const Tensors& shared, const Whole& whole, const Local& local, double tolerance) {
  const auto leaves = [](const Tensors& values) {
    Tensors all;
    for (const at::Tensor& value : values) all.push_back(value.clone().set_requires_grad(true));
    return all;
  };
  const Tensors x = leaves(by_token), w = leaves(shared);
  const at::Tensor y = whole(x, w);
  const at::Tensor direction = randn(y.sizes(), y.scalar_type(), 99);
  run_backward({y}, {direction});

  const std::vector<std::int32_t> cu = boundaries(layout);
  std::vector<Tensors> gradients(layout.ranks), shared_gradients(layout.ranks);
  Tensors outputs(layout.ranks);
  const auto errors =
      heddle::testing::run_ranks(layout.ranks, [&](const std::shared_ptr<comm::World>& world) {
        const comm::Group group = comm::Mesh({1, layout.ranks, 1, 1, 1}, world).world_group();
        const std::int64_t rank = group.rank();
        const ContextPlan plan(method, cu, layout.ranks, rank);
        const ContextParallel context(plan, group, at::kCPU);
        Tensors own;
        for (const at::Tensor& value : by_token) own.push_back(share(value, plan, rank));
        own = leaves(own);
        const Tensors all = leaves(shared);
        const at::Tensor part = local(own, all, context);
        run_backward({part}, {share(direction, plan, rank)});
        outputs[rank] = detached(part);
        for (const at::Tensor& leaf : own) gradients[rank].push_back(leaf.grad());
        for (const at::Tensor& leaf : all) shared_gradients[rank].push_back(leaf.grad());
      });
  ASSERT_THAT(errors, ::testing::Each(""));

  const ContextPlan plan(method, cu, layout.ranks, 0);
  // Ranks one after the other, as the expected value in that order.
  const auto in_rank_order = [&](const at::Tensor& value) {
    Tensors parts;
    for (std::int64_t rank = 0; rank < layout.ranks; ++rank)
      parts.push_back(share(value, plan, rank));
    return at::cat(parts);
  };
  EXPECT_TRUE(close(at::cat(outputs), in_rank_order(detached(y)), tolerance));
  for (std::size_t i = 0; i < by_token.size(); ++i) {
    Tensors parts;
    for (const Tensors& of_rank : gradients) parts.push_back(of_rank[i]);
    EXPECT_TRUE(close(at::cat(parts), in_rank_order(x[i].grad()), tolerance)) << "input " << i;
  }
  for (std::size_t i = 0; i < shared.size(); ++i) {
    at::Tensor sum = shared_gradients[0][i];
    for (std::int64_t rank = 1; rank < layout.ranks; ++rank) sum = sum + shared_gradients[rank][i];
    EXPECT_TRUE(close(sum, w[i].grad(), tolerance)) << "shared input " << i;
  }
}

void for_all_layouts(const std::function<void(const Layout&)>& check) {
  for (const Layout& layout : kLayouts) {
    std::string text = std::to_string(layout.ranks) + " ranks:";
    for (const std::int32_t n : layout.lengths) text += " " + std::to_string(n);
    SCOPED_TRACE(text);
    check(layout);
  }
}

KernelTable kernels_of(const OpRequest& request, c10::ScalarType type) {
  return testing::table_of(request, type == at::kDouble ? "reference" : "cpu.chunk", type);
}

TEST(ContextParallel, ConvolutionReachesIntoEarlierSegments) {
  const KernelTable kernels = kernels_of(any<CausalConv1d>(), at::kDouble);
  for_all_layouts([&](const Layout& layout) {
    const std::vector<std::int32_t> cu = boundaries(layout);
    const Sequences sequences = Sequences::from_host(cu, at::kCPU);
    compare(
        ContextMethod::kState, layout, {randn({cu.back(), 6}, at::kDouble, 1)},
        {randn({6, 4}, at::kDouble, 2)},
        [&](const Tensors& x, const Tensors& w) {
          return causal_conv1d(kernels, {x[0], w[0], {}, sequences}).y;
        },
        [&](const Tensors& x, const Tensors& w, const ContextParallel& context) {
          return causal_conv1d(
                     kernels, {x[0], w[0], context_conv_state(x[0], 4, context), context.fragments})
              .y;
        },
        1e-13);
  });
}

/// q, k, v, g, beta of a rule with `decay` per token in its first key head, natural log.
Tensors rule_inputs(std::int64_t T, c10::ScalarType type, double decay) {
  // The CPU kernel wants multiples of 16.
  const std::int64_t Hk = 2, Hv = 4, K = type == at::kDouble ? 8 : 16,
                     V = type == at::kDouble ? 6 : 16;
  at::Tensor g = at::log_sigmoid(randn({T, Hv}, type, 4) + 3);
  g.narrow(1, 0, Hv / Hk).sub_(decay);
  return {randn({T, Hk, K}, type, 1), randn({T, Hk, K}, type, 2), randn({T, Hv, V}, type, 3), g,
          at::sigmoid(randn({T, Hv}, type, 5))};
}

void check_rule(c10::ScalarType type, double decay, double tolerance) {
  const KernelTable kernels = kernels_of(any<GatedDeltaRule>(), type);
  for_all_layouts([&](const Layout& layout) {
    const std::vector<std::int32_t> cu = boundaries(layout);
    const Sequences sequences = Sequences::from_host(cu, at::kCPU);
    for (const bool again : {false, true}) {
      SCOPED_TRACE(again ? "made again" : "kept");
      const auto inputs_of = [&](const Tensors& x, const Sequences& of) {
        GatedDeltaRule::Inputs in{x[0], x[1], x[2], x[3], x[4], {}, of, {}, {}};
        if (again) {
          in.qkv_again = [q = detached(x[0]), k = detached(x[1]), v = detached(x[2])] {
            return std::array{q, k, v};
          };
        }
        return in;
      };
      compare(
          ContextMethod::kState, layout, rule_inputs(cu.back(), type, decay), {},
          [&](const Tensors& x, const Tensors&) {
            return gated_delta_rule(kernels, inputs_of(x, sequences)).o;
          },
          [&](const Tensors& x, const Tensors&, const ContextParallel& context) {
            return context_gated_delta_rule(kernels, inputs_of(x, context.fragments), context);
          },
          tolerance);
    }
  });
}

TEST(ContextParallel, StatesPassInDouble) { check_rule(at::kDouble, 0, 1e-12); }

TEST(ContextParallel, StatesPassInTheCpuKernel) { check_rule(at::kFloat, 0, 2e-5); }

TEST(ContextParallel, ASkippedTransitionDoesNotShow) {
  check_rule(at::kDouble, 10, 1e-12);
  check_rule(at::kFloat, 10, 2e-5);
}

TEST(ContextParallel, AttentionSeesTheKeysOfOtherRanks) {
  const KernelTable kernels = kernels_of(any<Attention>(), at::kDouble);
  for_all_layouts([&](const Layout& layout) {
    const std::vector<std::int32_t> cu = boundaries(layout);
    const std::int64_t T = cu.back();
    const Sequences sequences = Sequences::from_host(cu, at::kCPU);
    compare(
        ContextMethod::kState, layout,
        {randn({T, 4, 8}, at::kDouble, 1), randn({T, 2, 8}, at::kDouble, 2),
         randn({T, 2, 8}, at::kDouble, 3)},
        {},
        [&](const Tensors& x, const Tensors&) {
          return attention(kernels, {x[0], x[1], x[2], sequences, sequences, 0});
        },
        [&](const Tensors& x, const Tensors&, const ContextParallel& context) {
          return attention(kernels, context_attention_inputs(x[0], x[1], x[2], context));
        },
        1e-12);
  });
}

TEST(ContextParallel, UlyssesGivesEachRankSomeHeadsOfAllTokens) {
  const KernelTable kernels = kernels_of(any<Attention>(), at::kDouble);
  for_all_layouts([&](const Layout& layout) {
    const std::vector<std::int32_t> cu = boundaries(layout);
    const std::int64_t T = cu.back(), n = layout.ranks, D = 4;
    const Sequences sequences = Sequences::from_host(cu, at::kCPU);
    compare(
        ContextMethod::kUlysses, layout,
        {randn({T, 2 * n, D}, at::kDouble, 1), randn({T, n, D}, at::kDouble, 2),
         randn({T, n, D}, at::kDouble, 3)},
        {},
        [&](const Tensors& x, const Tensors&) {
          return attention(kernels, {x[0], x[1], x[2], sequences, sequences, 0}).flatten(1);
        },
        [&](const Tensors& x, const Tensors&, const ContextParallel& context) {
          const auto heads =
              tokens_to_heads({x[0].flatten(1), x[1].flatten(1), x[2].flatten(1)}, context);
          const auto of = [&](std::size_t i) { return heads[i].reshape({T, -1, D}); };
          return heads_to_tokens(
              attention(kernels, {of(0), of(1), of(2), context.sequences, context.sequences, 0})
                  .flatten(1),
              context);
        },
        1e-12);
  });
}

TEST(ContextPlan, CutsTheTokensIntoEqualSegmentsFromBothEnds) {
  const ContextPlan plan(ContextMethod::kState, {0, 10, 16}, 2, 1);
  EXPECT_EQ(plan.held(0), (std::vector<std::int64_t>{0, 3}));
  EXPECT_EQ(plan.held(1), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(plan.tokens(1), 8);
  ASSERT_EQ(plan.fragments().size(), 3u);  // 4..8 and 8..10 of the first, 10..12 of the second
  EXPECT_TRUE(plan.is_passed_through(1));
  EXPECT_FALSE(plan.is_passed_through(2));
  EXPECT_TRUE(plan.fragments()[0].enters && plan.fragments()[0].leaves);
  EXPECT_TRUE(plan.fragments()[1].enters && !plan.fragments()[1].leaves);
  EXPECT_TRUE(!plan.fragments()[2].enters && plan.fragments()[2].leaves);
  EXPECT_EQ(plan.gathered_row(13, 100), 5);
  EXPECT_EQ(plan.gathered_row(9, 100), 105);
}

}  // namespace
}  // namespace heddle::ops
