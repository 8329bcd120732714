#include "ops/swiglu/swiglu.h"

#include <ATen/TensorOperators.h>

#include "ops/builtin.h"
#include "ops/operator_support.h"

namespace heddle::ops::testing {
namespace {

KernelTable table(const std::string& name, c10::ScalarType dtype) {
  return table_of(any<Swiglu>(), name, dtype);
}

auto run(const KernelTable& kernels) {
  return [&kernels](const Tensors& in) { return Tensors{swiglu(kernels, in[0], in[1])}; };
}

TEST(Swiglu, GradientsMatchFiniteDifferences) {
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    EXPECT_TRUE(gradients_match(run(kernels),
                                {randn({3, 7}, at::kDouble, 1), randn({3, 7}, at::kDouble, 2)}))
        << name;
  }
}

TEST(Swiglu, KernelEqualsReference) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    const KernelTable kernel = table(kOwn, dtype), reference = table("reference", dtype);
    for (const auto& [rows, width] : {std::pair{0, 5}, {1, 1}, {3, 63}, {129, 65}, {2, 4099}}) {
      const Tensors inputs = {randn({rows, width}, dtype, 1) * 4, randn({rows, width}, dtype, 2)};
      const double tolerance = tolerance_of(dtype);
      EXPECT_TRUE(close(run(kernel)(inputs)[0], run(reference)(inputs)[0], tolerance));
      const Tensors g = gradients_of(run(kernel), inputs);
      const Tensors expected = gradients_of(run(reference), inputs);
      EXPECT_TRUE(close(g[0], expected[0], tolerance));
      EXPECT_TRUE(close(g[1], expected[1], tolerance));
    }
  }
}

TEST(Swiglu, MakesItsOutputAgainInTheBackward) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    for (const char* name : {"reference", kOwn}) {
      const KernelTable kernel = table(name, dtype);
      const Tensors inputs = {randn({29, 65}, dtype, 1), randn({29, 65}, dtype, 2)};
      at::Tensor again;
      const auto noting = [&](const Tensors& in) {
        return Tensors{swiglu(kernel, in[0], in[1], [&](const at::Tensor& y) { again = y; })};
      };
      const Tensors g = gradients_of(noting, inputs), expected = gradients_of(run(kernel), inputs);
      EXPECT_TRUE(identical(again, run(kernel)(inputs)[0]));
      EXPECT_TRUE(identical(g[0], expected[0]) && identical(g[1], expected[1]));
    }
  }
}

TEST(Swiglu, ReadsViewsOfOneProduct) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    const KernelTable kernel = table(kOwn, dtype);
    const at::Tensor gate_up = randn({29, 2 * 65}, dtype, 3);
    const at::Tensor gate = gate_up.narrow(1, 0, 65), up = gate_up.narrow(1, 65, 65);
    EXPECT_TRUE(
        identical(swiglu(kernel, gate, up), swiglu(kernel, gate.contiguous(), up.contiguous())));
    EXPECT_TRUE(identical(swiglu(kernel, with_poisoned_gaps(gate), with_poisoned_gaps(up)),
                          swiglu(kernel, gate, up)));
  }
}

TEST(Swiglu, SaturatesWithoutNaN) {
  const KernelTable kernel = table(kOwn, at::kFloat);
  at::Tensor gate = randn({1, 40}, at::kFloat, 1), up = randn({1, 40}, at::kFloat, 2);
  gate.select(1, 3).fill_(-200), gate.select(1, 17).fill_(200), gate.select(1, 39).fill_(-1e30);
  const at::Tensor y = swiglu(kernel, gate, up);
  EXPECT_FALSE(y.isnan().any().item().toBool());
  EXPECT_NEAR(y.select(1, 3).item().toDouble(), 0, 1e-30);
  EXPECT_FLOAT_EQ(y.select(1, 17).item().toFloat(), 200 * up.select(1, 17).item().toFloat());
  gate.select(1, 5).fill_(std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(swiglu(kernel, gate, up).select(1, 5).isnan().item().toBool());
}

}  // namespace
}  // namespace heddle::ops::testing
