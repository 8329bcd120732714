#include "ops/cuda/fused_support.h"

#include <ATen/TensorOperators.h>

namespace heddle::ops::testing {

Tensors rounded(const Tensors& tensors, c10::ScalarType dtype) {
  Tensors result;
  for (const at::Tensor& x : tensors) {
    result.push_back(x.is_floating_point() ? x.to(dtype).to(at::kDouble) : x);
  }
  return result;
}

Tensors on_gpu(const Tensors& tensors, c10::ScalarType dtype) {
  Tensors result;
  for (const at::Tensor& x : tensors) result.push_back(x.to(gpu(), dtype));
  return result;
}

KernelTable fused_table(const OpRequest& kernels, c10::ScalarType dtype) {
  return table_of(kernels, "cuda.fused", dtype, {Platform::kCuda});
}

void expect_fused_equals_reference(const OpRequest& kernels, const Operator& run,
                                   const Tensors& inputs, c10::ScalarType dtype) {
  const KernelTable reference = table_of(kernels, "reference", at::kDouble);
  const KernelTable fused = fused_table(kernels, dtype);
  const Tensors in = rounded(inputs, dtype), moved = on_gpu(in, dtype);
  const auto on_reference = [&](const Tensors& x) { return run(reference, x); };
  const auto on_fused = [&](const Tensors& x) { return run(fused, x); };
  const double tolerance = fused_tolerance(dtype);

  const Tensors expected = on_reference(in), actual = on_fused(moved), again = on_fused(moved);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!expected[i].defined()) continue;
    EXPECT_TRUE(close(actual[i].cpu(), expected[i], tolerance)) << "output " << i;
    EXPECT_TRUE(identical(actual[i].cpu(), again[i].cpu())) << "output " << i;
  }
  const Tensors expected_gradients = gradients_of(on_reference, in),
                gradients = gradients_of(on_fused, moved),
                gradients_again = gradients_of(on_fused, moved);
  for (std::size_t i = 0; i < in.size(); ++i) {
    ASSERT_EQ(gradients[i].defined(), expected_gradients[i].defined()) << "gradient " << i;
    if (!gradients[i].defined()) continue;
    EXPECT_EQ(gradients[i].scalar_type(), dtype) << "gradient " << i;
    EXPECT_TRUE(close(gradients[i].cpu(), expected_gradients[i], tolerance)) << "gradient " << i;
    EXPECT_TRUE(identical(gradients[i].cpu(), gradients_again[i].cpu())) << "gradient " << i;
  }
}

at::Tensor in_eight_bits(const at::Tensor& matrix) {
  const at::Tensor wide = matrix.to(at::kFloat);
  const at::Tensor scales = (std::get<0>(wide.abs().max(1, true)) / 448).clamp_min(0x1p-40);
  return (wide / scales).to(at::kFloat8_e4m3fn).to(at::kDouble) * scales.to(at::kDouble);
}

}  // namespace heddle::ops::testing
