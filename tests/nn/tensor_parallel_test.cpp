#include "nn/tensor_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sin.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/mesh.h"
#include "comm/ranks.h"
#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/linear/linear.h"

namespace heddle::nn {
namespace {

using comm::Dim;

constexpr std::int64_t kTokens = 10, kHidden = 3, kWidth = 8;

/// Numbers of no two rows alike.
at::Tensor numbers(std::int64_t rows, std::int64_t columns, double first) {
  return at::sin(at::arange(rows * columns, at::kDouble).add(first)).view({rows, columns});
}

ops::KernelTable linear_kernels() {
  return ops::KernelTable::choose(ops::builtin_registry(), {}, at::kDouble,
                                  {ops::OpRequest::of<ops::Linear>()});
}

void give_values(Linear& linear, const at::Tensor& whole, const comm::Mesh& mesh) {
  linear.weight().place(mesh);
  linear.weight().allocate(at::kDouble, c10::kCPU);
  linear.weight().write_owned(whole);
}

TEST(Linears, PostponedWeightGradientsComeAfterTheInputs) {
  const ops::KernelTable kernels = linear_kernels();
  Linear linear("linear.weight", kWidth, kHidden);
  give_values(linear, numbers(kWidth, kHidden, 1), comm::Mesh::single());
  at::Tensor x = numbers(kTokens, kHidden, 2).set_requires_grad(true);
  const at::Tensor dy = numbers(kTokens, kWidth, 3);
  LinearInput input(x);
  input.postponed = std::make_shared<PostponedWork>();
  ops::run_backward({linear.forward(kernels, input)}, {dy});
  EXPECT_TRUE(at::allclose(x.grad(), at::mm(dy, linear.weight().data())));
  EXPECT_FALSE(linear.weight().gradient().defined());
  input.postponed->run();
  EXPECT_TRUE(at::allclose(linear.weight().gradient(), at::mm(dy.t(), ops::detached(x))));
  // Nothing is left to add once more.
  input.postponed->run();
  EXPECT_TRUE(at::allclose(linear.weight().gradient(), at::mm(dy.t(), ops::detached(x))));
}

// Where no gradient of the input is wanted, nobody waits for it to come.
TEST(Linears, PostponeNothingForAnInputWithoutGradient) {
  const ops::KernelTable kernels = linear_kernels();
  Linear linear("linear.weight", kWidth, kHidden);
  give_values(linear, numbers(kWidth, kHidden, 1), comm::Mesh::single());
  const at::Tensor x = numbers(kTokens, kHidden, 2), dy = numbers(kTokens, kWidth, 3);
  LinearInput input(x);
  input.postponed = std::make_shared<PostponedWork>();
  ops::run_backward({linear.forward(kernels, input)}, {dy});
  EXPECT_TRUE(at::allclose(linear.weight().gradient(), at::mm(dy.t(), x)));
}

TEST(Linears, AddTheirOutputToAResidual) {
  const ops::KernelTable kernels = linear_kernels();
  Linear linear("linear.weight", kWidth, kHidden);
  give_values(linear, numbers(kWidth, kHidden, 1), comm::Mesh::single());
  const at::Tensor dy = numbers(kTokens, kWidth, 3);
  for (const bool is_evaluated : {true, false}) {
    at::Tensor x = numbers(kTokens, kHidden, 2).set_requires_grad(true),
               residual = numbers(kTokens, kWidth, 4).set_requires_grad(true);
    LinearInput input(x);
    input.residual = residual;
    input.outputs_unused = !is_evaluated;
    const at::Tensor y = linear.forward(kernels, input);
    if (is_evaluated) {
      EXPECT_TRUE(at::allclose(
          ops::detached(y),
          numbers(kTokens, kWidth, 4) + at::mm(ops::detached(x), linear.weight().data().t())));
    }
    ops::run_backward({y}, {dy});
    EXPECT_TRUE(at::equal(residual.grad(), dy));
    EXPECT_TRUE(at::allclose(x.grad(), at::mm(dy, linear.weight().data())));
  }
}

TEST(TensorParallel, ItsPartEqualsThatOfOneRank) {
  const at::Tensor up_whole = numbers(kWidth, kHidden, 1), down_whole = numbers(kHidden, kWidth, 2),
                   x_whole = numbers(kTokens, kHidden, 3), dy_whole = numbers(kTokens, kHidden, 4),
                   residual_whole = numbers(kTokens, kHidden, 5);
  const auto errors = testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    const ops::KernelTable kernels = linear_kernels();
    const comm::Mesh mesh({2, 1, 1, 1, 1}, world);
    const comm::Group group = mesh.group({Dim::kTp});
    const auto mine = [&](const at::Tensor& all, std::int64_t dim) {
      return all.chunk(2, dim)[static_cast<std::size_t>(group.rank())];
    };
    Linear up("up.weight", kWidth, kHidden, {{Dim::kTp, 0, {}}}),
        down("down.weight", kHidden, kWidth, {{Dim::kTp, 1, {}}});
    give_values(up, up_whole, mesh);
    give_values(down, down_whole, mesh);
    at::Tensor x = mine(x_whole, 0).clone().set_requires_grad(true),
               residual = mine(residual_whole, 0).clone().set_requires_grad(true);
    Pass pass;
    pass.kernels = &kernels;
    pass.tensor_group = &group;
    const at::Tensor y = run_tensor_parallel(
        x, pass, residual, [&](const LinearInput& rows, const at::Tensor& own_residual) {
          EXPECT_FALSE(own_residual.defined());  // after the sum over ranks
          return down.forward(kernels, up.forward(kernels, rows));
        });
    ops::run_backward({y}, {mine(dy_whole, 0)});

    const at::Tensor middle = at::mm(x_whole, up_whole.t()),
                     d_middle = at::mm(dy_whole, down_whole);
    const at::Tensor expected = residual_whole + at::mm(middle, down_whole.t());
    EXPECT_TRUE(at::allclose(ops::detached(y), mine(expected, 0)));
    EXPECT_TRUE(at::equal(residual.grad(), mine(dy_whole, 0)));
    EXPECT_TRUE(at::allclose(x.grad(), mine(at::mm(d_middle, up_whole), 0)));
    EXPECT_TRUE(at::allclose(up.weight().gradient(), mine(at::mm(d_middle.t(), x_whole), 0)));
    EXPECT_TRUE(at::allclose(down.weight().gradient(), mine(at::mm(dy_whole.t(), middle), 1)));
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

}  // namespace
}  // namespace heddle::nn
