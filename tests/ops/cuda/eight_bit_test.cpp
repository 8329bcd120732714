// Producers that write their results in 8 bits as well, and the products that read them.
#include "ops/cuda/eight_bit.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include "ops/autograd.h"
#include "ops/cuda/fused_support.h"
#include "ops/linear/cuda/fp8_tensors.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/swiglu/swiglu.h"

namespace heddle::ops::testing {
namespace {

template <class Op>
KernelTable table(const std::string& name) {
  return table_of(any<Op>(), name, at::kBFloat16, {Platform::kCuda});
}

class GpuEightBit : public GpuFused {};

at::Tensor matrix(std::int64_t rows, std::int64_t columns, std::uint64_t seed) {
  return randn({rows, columns}, at::kBFloat16, seed).to(gpu());
}

/// The form beside a tensor has the bits that a conversion of it gives.
void expect_same_rows(const at::Tensor& x) {
  const std::optional<cuda::EightBitRows> found = cuda::look_beside(x);
  ASSERT_TRUE(found.has_value());
  const at::Tensor copy = x.clone();
  ASSERT_FALSE(cuda::has_beside(copy));
  const cuda::EightBitRows expected = linear_fp8::rows_of(copy);
  EXPECT_TRUE(
      identical(found->values.view(at::kByte).cpu(), expected.values.view(at::kByte).cpu()));
  EXPECT_TRUE(identical(found->scales.cpu(), expected.scales.cpu()));
}

TEST_F(GpuEightBit, SwigluWritesItsOutputAndGradients) {
  const KernelTable plain = table<Swiglu>("cuda.fused"), both = table<Swiglu>("cuda.fused_fp8");
  const Swiglu::Functions &a = plain.get<Swiglu>(), &b = both.get<Swiglu>();
  for (const std::int64_t width : {784, 1040, 3584, 9216}) {
    SCOPED_TRACE(width);
    const std::int64_t rows = 4099;
    at::Tensor gate = matrix(rows, width, 1), up = matrix(rows, width, 2),
               dy = matrix(rows, width, 3);
    up[3].zero_();
    const at::Tensor y = b.forward(gate, up);
    EXPECT_TRUE(identical(y.cpu(), a.forward(gate, up).cpu()));
    expect_same_rows(y);
    const auto [d_gate, d_up, again] = b.backward_again(gate, up, dy);
    const auto [gate_expected, up_expected, y_expected] = a.backward_again(gate, up, dy);
    EXPECT_TRUE(identical(d_gate.cpu(), gate_expected.cpu()));
    EXPECT_TRUE(identical(d_up.cpu(), up_expected.cpu()));
    EXPECT_TRUE(identical(again.cpu(), y_expected.cpu()));
    expect_same_rows(d_gate);
    expect_same_rows(d_up);
  }
}

TEST_F(GpuEightBit, NormWritesItsOutputAndGradient) {
  const KernelTable plain = table<RmsNorm>("cuda.fused"), both = table<RmsNorm>("cuda.fused_fp8");
  const RmsNorm::Functions &a = plain.get<RmsNorm>(), &b = both.get<RmsNorm>();
  for (const std::int64_t width : {784, 1024, 2560, 5120}) {
    SCOPED_TRACE(width);
    const std::int64_t rows = 4099;
    const at::Tensor x = matrix(rows, width, 1), residual = matrix(rows, width, 2),
                     dy = matrix(rows, width, 3), ds = matrix(rows, width, 4);
    const NormWeight weight{matrix(1, width, 5)[0], 1};
    for (const at::Tensor& added : {at::Tensor(), residual}) {
      const RmsNorm::Forward found = b.forward(x, added, weight, 1e-6),
                             expected = a.forward(x, added, weight, 1e-6);
      EXPECT_TRUE(identical(found.y.cpu(), expected.y.cpu()));
      expect_same_rows(found.y);
      for (const at::Tensor& grad_sum : {at::Tensor(), ds}) {
        for (const at::Tensor& second : {at::Tensor(), residual}) {
          const RmsNorm::Backward in{x, weight, found.rstd, dy, second, grad_sum};
          const RmsNorm::Gradients g = b.backward(in), g_expected = a.backward(in);
          EXPECT_TRUE(identical(g.input.cpu(), g_expected.input.cpu()));
          EXPECT_TRUE(identical(g.weight.cpu(), g_expected.weight.cpu()));
          expect_same_rows(g.input);
        }
      }
    }
  }
}

// The product takes the form away, and its bits are those without one.
TEST_F(GpuEightBit, ProductsReadTheForm) {
  const KernelTable swiglu = table<Swiglu>("cuda.fused_fp8"),
                    kernels = table<Linear>("cuda.fp8_rowwise_or_bf16");
  const Linear::Functions& linear = kernels.get<Linear>();
  const std::int64_t rows = 4099, width = 3584;
  const at::Tensor w = matrix(4096, width, 99),
                   y = swiglu.get<Swiglu>().forward(matrix(rows, width, 1), matrix(rows, width, 2)),
                   copy = y.clone();
  ASSERT_TRUE(cuda::has_beside(y));
  ASSERT_FALSE(cuda::has_beside(copy));
  const at::Tensor found = linear.forward({{{ops::detached(y), w}}})[0];
  EXPECT_FALSE(cuda::has_beside(y));
  EXPECT_TRUE(identical(found.cpu(), linear.forward({{{copy, w}}})[0].cpu()));
  EXPECT_TRUE(identical(found.cpu(), linear.forward({{{y, w}}})[0].cpu()));
}

// A tensor that was written to since is another matrix; so is a part of it.
TEST_F(GpuEightBit, IsGoneWhereTheTensorChanged) {
  const KernelTable kernels = table<Swiglu>("cuda.fused_fp8");
  const auto made = [&](std::int64_t rows, std::int64_t width) {
    return kernels.get<Swiglu>().forward(matrix(rows, width, 1), matrix(rows, width, 2));
  };
  at::Tensor y = made(600, 512);
  EXPECT_TRUE(cuda::has_beside(y));
  EXPECT_TRUE(cuda::has_beside(ops::detached(y)));
  EXPECT_FALSE(cuda::has_beside(y.narrow(0, 0, 300)));
  EXPECT_FALSE(cuda::has_beside(y.t()));
  y.mul_(2);
  EXPECT_FALSE(cuda::has_beside(y));
  EXPECT_FALSE(cuda::take_beside(y).has_value());
  EXPECT_FALSE(cuda::has_beside(made(300, 512)));    // few rows
  EXPECT_FALSE(cuda::has_beside(made(600, 128)));    // narrow
  EXPECT_FALSE(cuda::has_beside(made(600, 520)));    // not a multiple of 16
  EXPECT_FALSE(cuda::has_beside(made(600, 10256)));  // longer than a block holds
}

}  // namespace
}  // namespace heddle::ops::testing
