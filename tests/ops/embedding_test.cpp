#include "ops/embedding/embedding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>

#include "ops/builtin.h"
#include "ops/operator_support.h"

namespace heddle::ops::testing {
namespace {

TEST(Embedding, AddsEveryRowToItsTokensSum) {
  const KernelTable kernels = table_of(any<Embedding>(), "reference", at::kBFloat16);
  const at::Tensor tokens = at::tensor({3, 0, 3, 3, 2}, at::kLong).to(device());
  const at::Tensor dy = randn({5, 7}, at::kBFloat16, 1), before = randn({4, 7}, at::kFloat, 2);
  at::Tensor sum = before.clone();
  kernels.get<Embedding>().backward(tokens, dy, sum);
  at::Tensor expected = before.clone();
  for (std::int64_t t = 0; t < 5; ++t)
    expected.select(0, tokens[t].item().toLong()).add_(dy.select(0, t));
  EXPECT_TRUE(close(sum, expected, 1e-6));
}

}  // namespace
}  // namespace heddle::ops::testing
