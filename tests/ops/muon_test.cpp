#include "ops/optimizer_step/muon.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_svdvals.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>

#include "ops/operator_support.h"

namespace heddle::ops::testing {
namespace {

/// The formula as torch.optim.Muon has it, in float64.
at::Tensor expected_direction(at::Tensor x) {
  const bool is_tall = x.size(0) > x.size(1);
  if (is_tall) x = x.t();
  x = x / x.norm().clamp_min(1e-7);
  for (int i = 0; i < 5; ++i) {
    const at::Tensor a = at::matmul(x, x.t());
    x = 3.4445 * x + at::matmul(-4.7750 * a + 2.0315 * at::matmul(a, a), x);
  }
  return is_tall ? x.t() : x;
}

TEST(Muon, OrthogonalizesAsTheFormulaSays) {
  for (const auto& [out, in] : {std::pair<int, int>{5, 5}, {3, 17}, {29, 4}, {64, 33}, {2, 2}}) {
    const at::Tensor x = randn({out, in}, at::kDouble, 7);
    EXPECT_TRUE(orthogonalized(x).allclose(expected_direction(x), 1e-12, 1e-12))
        << out << "x" << in;
  }
}

TEST(Muon, MakesSingularValuesAlike) {
  const at::Tensor x = randn({48, 31}, at::kFloat, 3) * 1e-4;
  const at::Tensor values = at::linalg_svdvals(orthogonalized(x).cpu().to(at::kDouble));
  EXPECT_GT(values.min().item<double>(), 0.3);
  EXPECT_LT(values.max().item<double>(), 1.3);
}

TEST(Muon, TakesEachMatrixOfAStackByItself) {
  const at::Tensor a = randn({6, 9}, at::kDouble, 1), b = randn({6, 9}, at::kDouble, 2) * 100;
  const at::Tensor both = orthogonalized(at::stack({a, b}));
  EXPECT_TRUE(both[0].allclose(orthogonalized(a), 1e-12, 1e-12));
  EXPECT_TRUE(both[1].allclose(orthogonalized(b), 1e-12, 1e-12));
  EXPECT_EQ(orthogonalized(at::zeros({3, 0, 4}, a.options())).numel(), 0);
}

TEST(Muon, AZeroMatrixStaysZero) {
  const at::Tensor zero = at::zeros({4, 7}, at::TensorOptions(at::kDouble).device(device()));
  EXPECT_EQ(orthogonalized(zero).abs().max().item<double>(), 0);
}

TEST(Muon, StepsAsTheFormulaSays) {
  MuonTensor tensor;
  tensor.parameter = randn({7, 5}, at::kDouble, 1).clone();
  tensor.momentum_buffer = at::zeros_like(tensor.parameter);
  tensor.weight_decay = 0.1;
  at::Tensor p = tensor.parameter.clone(), buffer = at::zeros_like(p);
  const double lr = 0.02, momentum = 0.95;
  for (int step = 0; step < 4; ++step) {
    const at::Tensor g = randn({7, 5}, at::kDouble, 10 + step);
    tensor.gradient = g;
    muon_apply(tensor, orthogonalized(muon_direction(tensor, momentum, 0.5)), lr, muon_scale(7, 5));
    buffer = momentum * buffer + (1 - momentum) * 0.5 * g;
    const at::Tensor nesterov = (1 - momentum) * 0.5 * g + momentum * buffer;
    p = p * (1 - lr * 0.1) - lr * 0.2 * std::sqrt(7.) * expected_direction(nesterov);
    EXPECT_TRUE(tensor.parameter.allclose(p, 1e-12, 1e-12)) << step;
  }
}

TEST(Muon, RoundsTheMasterIntoTheWeight) {
  MuonTensor tensor;
  tensor.master = randn({8, 3}, at::kFloat, 1).clone();
  tensor.parameter = tensor.master.to(at::kBFloat16);
  tensor.momentum_buffer = at::zeros_like(tensor.master);
  tensor.gradient = randn({8, 3}, at::kBFloat16, 2);
  const at::Tensor before = tensor.master.clone();
  muon_apply(tensor, orthogonalized(muon_direction(tensor, 0.95, 1)), 1e-4, muon_scale(8, 3));
  EXPECT_FALSE(tensor.master.equal(before));
  EXPECT_TRUE(tensor.parameter.equal(tensor.master.to(at::kBFloat16)));
}

}  // namespace
}  // namespace heddle::ops::testing
