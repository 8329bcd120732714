#include "adapters/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sin.h>
#include <gtest/gtest.h>

#include "comm/mesh.h"
#include "ops/autograd.h"
#include "ops/builtin.h"

namespace heddle::adapters {
namespace {

constexpr std::int64_t kTokens = 10, kIn = 3, kOut = 8, kRank = 2;

at::Tensor numbers(std::int64_t rows, std::int64_t columns, double first) {
  return at::sin(at::arange(rows * columns, at::kDouble).add(first)).view({rows, columns});
}

void give_values(nn::Parameter& parameter, const at::Tensor& whole) {
  parameter.place(comm::Mesh::single());
  parameter.allocate(at::kDouble, c10::kCPU);
  parameter.write_owned(whole);
}

/// The gradients of an adapted layer come with what is postponed, after that of its input.
void check_postponed(double dropout) {
  const auto kernels = ops::KernelTable::choose(ops::builtin_registry(), c10::DeviceType::CPU,
                                                at::kDouble, {{ops::Linear::kName, {{}}}});
  nn::Linear linear("layer.weight", kOut, kIn);
  const at::Tensor weight = numbers(kOut, kIn, 1), a = numbers(kRank, kIn, 2),
                   b = numbers(kOut, kRank, 3), dy = numbers(kTokens, kOut, 4);
  give_values(linear.weight(), weight);
  linear.weight().set_trainable(false);
  const double scaling = 0.5;
  const auto lora = std::make_shared<Lora>("layer", kIn, kOut, scaling, kRank, dropout, 0);
  give_values(lora->a(), a);
  give_values(lora->b(), b);
  // As good as none is dropped: what is of interest is the path.
  if (dropout > 0) lora->set_dropout({1, at::arange(kTokens, at::kLong), 0});
  linear.set_adapter(lora);

  const at::Tensor x = numbers(kTokens, kIn, 5).set_requires_grad(true);
  nn::LinearInput input(x);
  input.postponed = std::make_shared<nn::PostponedWork>();
  ops::run_backward({linear.forward(kernels, input)}, {dy});
  EXPECT_TRUE(at::allclose(x.grad(), at::mm(dy, weight + scaling * at::mm(b, a))));
  EXPECT_FALSE(lora->a().gradient().defined());
  input.postponed->run();
  const at::Tensor value = ops::detached(x);
  EXPECT_TRUE(at::allclose(lora->a().gradient(), scaling * at::mm(at::mm(dy, b).t(), value)));
  EXPECT_TRUE(at::allclose(lora->b().gradient(), scaling * at::mm(dy.t(), at::mm(value, a.t()))));
  EXPECT_FALSE(linear.weight().gradient().defined());
}

TEST(Lora, PostponedGradientsComeAfterTheInputs) { check_postponed(/*dropout=*/0); }
TEST(Lora, PostponedGradientsComeAfterTheInputsWithDropout) { check_postponed(/*dropout=*/1e-12); }

}  // namespace
}  // namespace heddle::adapters
