// The gradient of the embedding on the GPU, against the reference in fp64 on the CPU.
#include "ops/embedding/embedding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>

#include "ops/builtin.h"
#include "ops/cuda/fused_support.h"

namespace heddle::ops::testing {
namespace {

const OpRequest kEmbedding = any<Embedding>();

class GpuEmbedding : public GpuFused {};

TEST_F(GpuEmbedding, GradientEqualsReference) {
  const KernelTable reference = table_of(any<Embedding>(), "reference", at::kDouble);
  const std::int64_t rows = 50;
  for (const std::int64_t count : {0, 1, 31, 32, 33, 1000, 5000}) {
    for (const std::int64_t width : {8, 100, 2560}) {
      // A few tokens are most of them, as in text; then one is all.
      const at::Tensor deviates = randn({count}, at::kDouble, 1);
      const at::Tensor few = (deviates * deviates * 8).to(at::kLong).clamp(0, rows - 1);
      for (const at::Tensor& tokens : {few, at::full({count}, 7, at::kLong)}) {
        for (const auto& [row_type, sum_type] : {std::pair{at::kBFloat16, at::kFloat},
                                                 {at::kBFloat16, at::kBFloat16},
                                                 {at::kFloat, at::kFloat}}) {
          const at::Tensor dy = randn({count, width}, row_type, 2);
          const at::Tensor before = randn({rows, width}, sum_type, 3);
          at::Tensor expected = before.to(at::kDouble), sum = before.to(gpu()),
                     again = before.to(gpu());
          reference.get<Embedding>().backward(tokens, dy.to(at::kDouble), expected);
          const KernelTable kernels =
              table_of(any<Embedding>(), "cuda.sorted", row_type, {Platform::kCuda});
          kernels.get<Embedding>().backward(tokens.to(gpu()), dy.to(gpu()), sum);
          kernels.get<Embedding>().backward(tokens.to(gpu()), dy.to(gpu()), again);
          EXPECT_TRUE(close(sum.cpu(), expected, sum_type == at::kFloat ? 1e-5 : 1e-2))
              << count << " rows of " << width;
          EXPECT_TRUE(identical(sum.cpu(), again.cpu())) << count << " rows of " << width;
        }
      }
    }
  }
}

}  // namespace
}  // namespace heddle::ops::testing
