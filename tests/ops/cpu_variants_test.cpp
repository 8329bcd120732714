// The vector sources are compiled for several instruction sets and this processor picks one: the
// others must give the same numbers.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <vector>

#include "ops/attention/cpu/vector/attention_blocks.h"
#include "ops/linear_cross_entropy/cpu/vector/softmax_rows.h"
#include "ops/operator_support.h"
#include "ops/optimizer_step/cpu/vector/adamw_elements.h"
#include "ops/rms_norm/cpu/vector/rms_norm_rows.h"
#include "ops/swiglu/cpu/vector/swiglu_rows.h"

namespace heddle::ops::testing {
namespace {

/// The functions of every instruction set that can run here, the plainest first.
#if defined(__x86_64__) || defined(_M_X64)
#define HEDDLE_ALL_VARIANTS(function)                                       \
  [] {                                                                      \
    std::vector<decltype(&baseline::function)> all = {&baseline::function}; \
    if (heddle_cpu_capability() >= CpuCapability::kAvx2) {                  \
      all.push_back(&avx2::function);                                       \
    }                                                                       \
    if (heddle_cpu_capability() >= CpuCapability::kAvx512) {                \
      all.push_back(&avx512::function);                                     \
    }                                                                       \
    return all;                                                             \
  }()
#else
#define HEDDLE_ALL_VARIANTS(function) \
  std::vector<decltype(&baseline::function)> { &baseline::function }
#endif

constexpr std::int64_t kRows = 5, kWidth = 131;

TEST(CpuVariants, SwigluAgrees) {
  const at::Tensor gate = randn({kRows, kWidth}, at::kFloat, 1) * 10,
                   up = randn({kRows, kWidth}, at::kFloat, 2);
  at::Tensor first;
  for (const auto kernels : HEDDLE_ALL_VARIANTS(swiglu_kernels)) {
    at::Tensor y = at::empty({kRows, kWidth});
    SwigluRows rows;
    rows.gate = gate.const_data_ptr(), rows.up = up.const_data_ptr();
    rows.gate_stride = rows.up_stride = rows.width = kWidth;
    rows.y = y.mutable_data_ptr();
    kernels(0).forward(rows, 0, kRows);
    if (!first.defined()) first = y;
    EXPECT_TRUE(close(y, first, 5e-7));
  }
}

TEST(CpuVariants, ExponentialIsWithinTwoUlp) {
  // A softmax row of two logits (x, 0) without gradient gives log p = x - log(e^x + 1).
  for (const auto kernels : HEDDLE_ALL_VARIANTS(softmax_row_kernels)) {
    for (double x = -80; x < 0; x += 0.37) {
      // With a gradient the row becomes p: for large negative x, p(0) = e^x to rounding.
      float row[2] = {static_cast<float>(x), 0}, factor = 1, logprob = 0, entropy = 0;
      kernels().run_float(row, 2, 1, &factor, nullptr, &logprob, &entropy);
      const double exact = std::exp(static_cast<double>(static_cast<float>(x)));
      EXPECT_NEAR(row[0], exact / (1 + exact), 3e-7 * exact) << x;
    }
  }
}

TEST(CpuVariants, NormAgrees) {
  const at::Tensor x = randn({kRows, kWidth}, at::kFloat, 1), w = randn({kWidth}, at::kFloat, 2),
                   dy = randn({kRows, kWidth}, at::kFloat, 3);
  Tensors first;
  for (const auto kernels : HEDDLE_ALL_VARIANTS(rms_norm_kernels)) {
    const Tensors out = {at::empty({kRows, kWidth}), at::empty({kRows}), at::empty({kRows, kWidth}),
                         at::zeros({kWidth})};
    RmsNormRows rows;
    rows.x = x.const_data_ptr(), rows.scale = w.const_data_ptr();
    rows.y = out[0].data_ptr(), rows.rstd = out[1].data_ptr();
    rows.eps = 1e-6, rows.width = kWidth;
    rows.grad_y = dy.const_data_ptr(), rows.grad_x = out[2].data_ptr();
    rows.grad_weight = out[3].data_ptr();
    kernels(0).forward(rows, 0, kRows);
    kernels(0).backward(rows, 0, kRows);
    if (first.empty()) first = out;
    for (std::size_t i = 0; i < out.size(); ++i) EXPECT_TRUE(close(out[i], first[i], 1e-6)) << i;
  }
}

TEST(CpuVariants, AdamwAgreesAndSumsOfSquaresToo) {
  const at::Tensor g = randn({kWidth}, at::kFloat, 3);
  Tensors first;
  for (const auto kernel : HEDDLE_ALL_VARIANTS(adamw_kernel)) {
    const Tensors state = {randn({kWidth}, at::kFloat, 1), randn({kWidth}, at::kFloat, 2),
                           randn({kWidth}, at::kFloat, 4).abs()};
    AdamwElements elements;
    elements.value = state[0].data_ptr(), elements.exp_avg = state[1].data_ptr();
    elements.exp_avg_sq = state[2].data_ptr(), elements.gradient = g.const_data_ptr();
    AdamwScalars scalars;
    scalars.decay = 0.99, scalars.beta1 = 0.9, scalars.beta2 = 0.99;
    scalars.step_size = 0.1, scalars.root_correction2 = 0.5, scalars.eps = 1e-8;
    kernel(0, 0)(elements, scalars, 0, kWidth);
    if (first.empty()) first = state;
    for (std::size_t i = 0; i < state.size(); ++i) EXPECT_TRUE(close(state[i], first[i], 1e-6));
  }
  for (const auto kernel : HEDDLE_ALL_VARIANTS(square_sum_kernel)) {
    EXPECT_NEAR(kernel(0)(g.const_data_ptr(), 0, kWidth),
                g.to(at::kDouble).pow(2).sum().item().toDouble(), 1e-10);
  }
}

TEST(CpuVariants, AttentionAgrees) {
  constexpr std::int64_t kTokens = 150, kDim = 40;
  const long padded = attention_padded_dim(kDim), blocks = 192;
  const at::Tensor q = randn({kTokens, kDim}, at::kFloat, 1),
                   k = randn({kTokens, kDim}, at::kFloat, 2),
                   v = randn({kTokens, kDim}, at::kFloat, 3),
                   dy = randn({kTokens, kDim}, at::kFloat, 4);
  Tensors first;
  for (const auto make : HEDDLE_ALL_VARIANTS(attention_kernels)) {
    const AttentionKernels kernels = make(0);
    const at::Tensor k_rows = at::empty({blocks, padded}), k_columns = at::empty({blocks, padded}),
                     v_rows = at::empty({blocks, padded}), v_columns = at::empty({blocks, padded});
    kernels.pack(k.const_data_ptr(), kDim, kTokens, kDim, k_rows.data_ptr(), k_columns.data_ptr());
    kernels.pack(v.const_data_ptr(), kDim, kTokens, kDim, v_rows.data_ptr(), v_columns.data_ptr());
    const Tensors out = {at::empty({kTokens, kDim}), at::empty({kTokens}),
                         at::empty({kTokens, kDim}), at::empty({blocks, padded}),
                         at::empty({blocks, padded})};
    const at::Tensor scratch = at::empty(
        {attention_forward_scratch(padded) + attention_backward_scratch(kTokens, padded)});
    AttentionHead a;
    a.queries = a.keys = kTokens, a.dim = kDim, a.padded = padded, a.scale = 0.2;
    a.q = q.const_data_ptr(), a.q_stride = a.o_stride = kDim;
    a.out = out[0].data_ptr(), a.o = out[0].data_ptr(), a.grad_o = dy.const_data_ptr();
    a.lse = out[1].data_ptr(), a.lse_stride = 1, a.grad_q = out[2].data_ptr();
    a.key_rows = k_rows.data_ptr(), a.key_columns = k_columns.data_ptr();
    a.value_rows = v_rows.data_ptr(), a.value_columns = v_columns.data_ptr();
    a.grad_k = out[3].data_ptr(), a.grad_v = out[4].data_ptr(), a.scratch = scratch.data_ptr();
    for (long begin = 0; begin < kTokens; begin += kAttentionBlock) {
      kernels.forward(a, begin, std::min<long>(begin + kAttentionBlock, kTokens));
    }
    kernels.backward(a);
    if (first.empty()) first = out;
    for (std::size_t i = 0; i < out.size(); ++i) EXPECT_TRUE(close(out[i], first[i], 3e-6)) << i;
  }
}

}  // namespace
}  // namespace heddle::ops::testing
