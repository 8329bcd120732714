// Gradients of the differentiable collectives against finite differences of what they compute.
#include "ops/collectives.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "comm/mesh.h"
#include "comm/ranks.h"
#include "ops/autograd.h"

namespace heddle {
namespace {

using comm::Group;
using Operator = std::function<at::Tensor(const at::Tensor&, const Group&)>;

/// Element-wise weights of a rank's output, so that no two elements count alike.
at::Tensor weights_like(const at::Tensor& y, std::int64_t rank) {
  return at::sin(at::arange(y.numel(), at::kDouble).add(static_cast<double>(10 * rank)))
      .view(y.sizes());
}

/// The job's loss: the sum over ranks of a weighted sum of outputs.
double loss(const at::Tensor& x, const Group& group, const Operator& op) {
  const ops::NoGradient guard;
  const at::Tensor y = op(x, group);
  return group.all_reduce_sum((y * weights_like(y, group.rank())).sum().item<double>());
}

void check_gradient(const Operator& op, std::int64_t rows) {
  const auto errors = testing::run_ranks(3, [&](const std::shared_ptr<comm::World>& world) {
    const Group group = comm::Mesh({1, 1, 1, 3, 1}, world).world_group();
    at::Tensor x = at::cos(at::arange(rows * 2, at::kDouble).add(static_cast<double>(group.rank())))
                       .view({rows, 2});
    at::Tensor leaf = x.clone().set_requires_grad(true);
    const at::Tensor y = op(leaf, group);
    ops::run_backward({y}, {weights_like(y, group.rank())});
    const double step = 1e-5;
    for (std::int64_t rank = 0; rank < 3; ++rank) {
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        // All ranks compute; only one moves its input.
        const auto at = [&](double by) {
          at::Tensor moved = x.clone();
          if (group.rank() == rank) moved.view({-1})[i].add_(by);
          return loss(moved, group, op);
        };
        const double expected = (at(step) - at(-step)) / (2 * step);
        if (group.rank() == rank) {
          EXPECT_NEAR(leaf.grad().view({-1})[i].item<double>(), expected, 1e-8)
              << "rank " << rank << ", element " << i;
        }
      }
    }
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

TEST(Collectives, AllGatherRows) { check_gradient(ops::all_gather_rows, 3); }

TEST(Collectives, ReduceScatterRows) { check_gradient(ops::reduce_scatter_rows, 6); }

TEST(Collectives, AllToAllRowsWithUnevenAndEmptyParts) {
  const std::vector<std::vector<std::int64_t>> rows = {{2, 0, 1}, {1, 1, 1}, {0, 3, 0}};
  check_gradient(
      [&](const at::Tensor& x, const Group& group) {
        std::vector<std::int64_t> received;
        for (const auto& sent : rows) received.push_back(sent[group.rank()]);
        return ops::all_to_all_rows(x, rows[group.rank()], received, group);
      },
      3);
}

TEST(Collectives, ARowExchangeInTwoStepsIsTheSame) {
  const std::vector<std::vector<std::int64_t>> rows = {{2, 0, 1}, {1, 1, 1}, {0, 3, 0}};
  check_gradient(
      [&](const at::Tensor& x, const Group& group) {
        std::vector<std::int64_t> received;
        for (const auto& sent : rows) received.push_back(sent[group.rank()]);
        return ops::RowExchange(x, rows[group.rank()], received, group).wait();
      },
      3);
}

// Or the backward of what was meant to run beside it would wait for it.
TEST(Collectives, TheGradientTravelsWhileWhatIsBetweenTheStepsRunsBackward) {
  const auto errors = testing::run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const Group group = comm::Mesh({2, 1, 1, 1, 1}, world).group({comm::Dim::kTp});
    std::vector<std::string> order;
    const auto marked = [&](const char* name, const at::Tensor& x) {
      return ops::with_gradient(name, {x}, {x.detach().clone()}, [&, name](const auto& dy) {
        order.emplace_back(name);
        return ops::Tensors{dy[0]};
      })[0];
    };
    const at::Tensor x = at::arange(4, at::kDouble).view({4, 1}).set_requires_grad(true);
    ops::RowExchange exchange(marked("sent", x), {2, 2}, {2, 2}, group);
    const at::Tensor between = marked("between", x);
    const at::Tensor y = marked("received", exchange.wait());
    ops::run_backward({y + between}, {at::ones_like(y)});
    EXPECT_THAT(order, ::testing::ElementsAre("received", "between", "sent"));
    EXPECT_TRUE(at::allclose(x.grad(), 2 * at::ones_like(x)));
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

TEST(Collectives, RowsGatheredThenScatteredAreASumOfShares) {
  // A column and a row of a product: every rank scales all rows in its own way and keeps its rows
  // of the sum of the shares.
  const auto errors = testing::run_ranks(3, [](const std::shared_ptr<comm::World>& world) {
    const Group group = comm::Mesh({3, 1, 1, 1, 1}, world).group({comm::Dim::kTp});
    const ops::Rows rows = ops::own_rows(6, group);
    EXPECT_EQ(rows.first, 2 * group.rank());
    const auto own = [&](const at::Tensor& t) { return t.narrow(0, rows.first, rows.count); };
    const at::Tensor whole = at::sin(at::arange(12, at::kDouble)).view({6, 2});
    at::Tensor x = own(whole).clone().set_requires_grad(true);
    const auto scale = static_cast<double>(group.rank() + 1);
    const at::Tensor y = ops::reduce_scatter_rows(ops::all_gather_rows(x, group) * scale, group);
    EXPECT_TRUE(at::allclose(y.detach(), own(whole) * (1 + 2 + 3)));
    const at::Tensor dy = at::cos(whole);
    ops::run_backward({y}, {own(dy)});
    EXPECT_TRUE(at::allclose(x.grad(), own(dy) * (1 + 2 + 3)));
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

TEST(Collectives, ReduceFromGroupHandsEveryRankItsGradient) {
  // All go on with the same sum, and the loss counts it once.
  const auto errors = testing::run_ranks(3, [](const std::shared_ptr<comm::World>& world) {
    const Group group = comm::Mesh({3, 1, 1, 1, 1}, world).group({comm::Dim::kTp});
    const auto scale = static_cast<double>(group.rank() + 1);
    at::Tensor x = at::arange(4, at::kDouble).set_requires_grad(true);
    const at::Tensor y = ops::reduce_from_group(x * scale, group);
    EXPECT_EQ(y[3].item<double>(), 3 * (1 + 2 + 3));
    ops::run_backward({y}, {at::arange(4, at::kDouble)});
    EXPECT_EQ(x.grad()[3].item<double>(), 3 * scale);
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

}  // namespace
}  // namespace heddle
