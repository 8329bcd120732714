#pragma once

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include "ops/operator_support.h"

/// Shared by the tests of the fused CUDA kernels.
namespace heddle::ops::testing {

inline c10::Device gpu() { return c10::Device(c10::DeviceType::CUDA, 0); }

/// bf16 rows on the GPU with NaN between them; a gap of a multiple of 16 leaves them aligned.
inline at::Tensor matrix(std::int64_t rows, std::int64_t columns, std::uint64_t seed,
                         std::int64_t gap) {
  return with_poisoned_gaps(randn({rows, columns}, at::kBFloat16, seed).to(gpu()), gap);
}

/// Relative to the norm of `exact`.
inline double error(const at::Tensor& found, const at::Tensor& exact) {
  return ((found.cpu().to(at::kDouble) - exact).norm() / exact.norm()).item().toDouble();
}

/// An operator as a function of tensors only, run with a table's kernel.
using Operator = std::function<Tensors(const KernelTable&, const Tensors&)>;

/// Names whose kernels are tested.
struct Registered {
  void (*add)(Registry&);
  const char* op;
};

/// `tensors` rounded to dtype and held in fp64: what both sides are given.
Tensors rounded(const Tensors& tensors, c10::ScalarType dtype);
Tensors on_gpu(const Tensors& tensors, c10::ScalarType dtype);

/// Compares outputs and gradients of "cuda.fused" in `dtype` with the reference in fp64 on the CPU,
/// and two runs of it bit by bit. Inputs are fp64.
void expect_fused_equals_reference(const OpRequest& kernels, const Operator& run,
                                   const Tensors& inputs, c10::ScalarType dtype);

/// A matrix in 8 bits, each row with a scale of its own; in fp64.
at::Tensor in_eight_bits(const at::Tensor& matrix);

/// The fused kernel's table.
KernelTable fused_table(const OpRequest& kernels, c10::ScalarType dtype);

inline double fused_tolerance(c10::ScalarType dtype) { return dtype == at::kFloat ? 1e-5 : 1e-2; }

class GpuFused : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or libtorch_cuda is not linked";
  }
};

}  // namespace heddle::ops::testing
