#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "ops/builtin.h"
#include "ops/linear/cpu/vector/few_rows_kernel.h"
#include "ops/linear/few_rows.h"
#include "ops/linear/linear.h"
#include "ops/operator_support.h"

namespace heddle::ops::testing {
namespace {

at::Tensor exact(const at::Tensor& x, const at::Tensor& weight) {
  return at::mm(x.to(at::kDouble), weight.to(at::kDouble).t());
}

TEST(FewRows, EqualsTheProductForEveryRowCount) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t depth : {7, 64, 515}) {
      for (std::int64_t rows = 1; rows <= 32; ++rows) {
        const at::Tensor x = with_poisoned_gaps(randn({rows, depth}, dtype, 1));
        const at::Tensor weight = with_poisoned_gaps(randn({77, depth}, dtype, 2));
        ASSERT_TRUE(few_rows_fits(x, weight));
        EXPECT_TRUE(close(few_rows_product(x, weight), exact(x, weight), tolerance_of(dtype)))
            << rows << " rows of " << depth;
      }
    }
  }
}

TEST(FewRows, ThreadsDoNotChangeTheBits) {
  const int before = at::get_num_threads();
  const at::Tensor weight = randn({1001, 300}, at::kFloat, 3);
  for (const std::int64_t rows : {1, 3, 16, 20}) {
    const at::Tensor x = randn({rows, 300}, at::kFloat, 4);
    at::set_num_threads(1);
    const at::Tensor one = few_rows_product(x, weight);
    at::set_num_threads(3);
    EXPECT_TRUE(identical(one, few_rows_product(x, weight)));
  }
  at::set_num_threads(before);
}

TEST(FewRows, EveryInstructionSetAgrees) {
  FewRowsKernels (*const variants[])(bool) = HEDDLE_CPU_EACH(few_rows_kernels);
  const at::Tensor weight = randn({37, 129}, at::kFloat, 5), x = randn({19, 129}, at::kFloat, 6);
  for (int v = 0; v <= static_cast<int>(heddle_cpu_capability()); ++v) {
    const FewRowsKernels kernels = variants[v](false);
    at::Tensor y = at::empty({19, 37}), lanes = at::empty({2, 129, kPackedRows});
    const FewRows a{
        x.const_data_ptr(), weight.const_data_ptr(), y.mutable_data_ptr(), 19, 129, 37, 129, 129};
    kernels.pack(a, lanes.mutable_data_ptr<float>());
    for (const float* const packed : {lanes.const_data_ptr<float>(), (const float*)nullptr}) {
      kernels.multiply(a, packed, 0, 37);
      EXPECT_TRUE(close(y, exact(x, weight), tolerance_of(at::kFloat))) << v;
    }
  }
}

TEST(FewRows, LeavesOtherProductsToTheLibrary) {
  const at::Tensor weight = randn({8, 16}, at::kFloat, 1);
  EXPECT_FALSE(few_rows_fits(randn({33, 16}, at::kFloat, 2), weight));
  EXPECT_FALSE(few_rows_fits(randn({2, 16}, at::kDouble, 2), weight.to(at::kDouble)));
  EXPECT_FALSE(few_rows_fits(randn({16, 2}, at::kFloat, 2).t(), weight));
}

/// Sums by every kernel that the device has.
class LinearSums : public ::testing::TestWithParam<Kernel> {};

TEST_P(LinearSums, AddTheirTerms) {
  const auto [name, dtype] = GetParam();
  const KernelTable kernels = table_of(any<Linear>(), name, dtype);
  for (const std::int64_t rows : {1, 40}) {
    const at::Tensor x = randn({rows, 29}, dtype, 1), low = randn({rows, 3}, dtype, 2);
    const at::Tensor w = randn({17, 29}, dtype, 3), b = randn({17, 3}, dtype, 4),
                     v = randn({5, 29}, dtype, 5);
    const Tensors y = kernels.get<Linear>().forward({{{x, w}, {low, b}}, {{x, v}}});
    ASSERT_EQ(y.size(), 2);
    EXPECT_TRUE(close(y[0], exact(x, w) + exact(low, b), tolerance_of(dtype)));
    EXPECT_TRUE(close(y[1], exact(x, v), tolerance_of(dtype)));
    const at::Tensor start = randn({rows, 17}, dtype, 6);
    EXPECT_TRUE(close(kernels.get<Linear>().forward_onto(start, {{x, w}, {low, b}}),
                      start.to(at::kDouble) + exact(x, w) + exact(low, b), tolerance_of(dtype)));
    const at::Tensor dx = kernels.get<Linear>().backward({{y[0], w}, {y[1], v}});
    EXPECT_TRUE(close(dx, exact(y[0], w.t()) + exact(y[1], v.t()), tolerance_of(dtype)));
  }
}

TEST_P(LinearSums, GiveTheGradientsOfLowRankChanges) {
  const auto [name, dtype] = GetParam();
  const KernelTable kernels = table_of(any<Linear>(), name, dtype);
  const at::Tensor dy = randn({40, 17}, dtype, 1), b = randn({17, 3}, dtype, 2),
                   low = randn({40, 3}, dtype, 3);
  const at::Tensor dz = randn({40, 5}, dtype, 4), c = randn({5, 2}, dtype, 5),
                   narrow = randn({40, 2}, dtype, 6);
  const auto gradients = kernels.get<Linear>().low_rank_backward({{dy, b, low}, {dz, c, narrow}});
  EXPECT_TRUE(close(gradients.d_low.narrow(1, 0, 3), exact(dy, b.t()), tolerance_of(dtype)));
  EXPECT_TRUE(close(gradients.d_low.narrow(1, 3, 2), exact(dz, c.t()), tolerance_of(dtype)));
  ASSERT_EQ(gradients.d_b.size(), 2);
  EXPECT_TRUE(close(gradients.d_b[0], exact(dy.t(), low.t()), tolerance_of(dtype)));
  EXPECT_TRUE(close(gradients.d_b[1], exact(dz.t(), narrow.t()), tolerance_of(dtype)));
}

INSTANTIATE_TEST_SUITE_P(Kernels, LinearSums,
                         ::testing::Values(Kernel{kOwn, at::kFloat}, Kernel{kOwn, at::kBFloat16},
                                           Kernel{"reference", at::kFloat},
                                           Kernel{"reference", at::kDouble}),
                         heddle::testing::ParameterName());

}  // namespace
}  // namespace heddle::ops::testing
