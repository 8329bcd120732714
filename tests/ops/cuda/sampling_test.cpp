// sample_tokens on the GPU draws what the CPU draws.
#include "ops/sampling/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/tensor.h>

#include "ops/builtin.h"
#include "ops/cuda/fused_support.h"

namespace heddle::ops::testing {
namespace {

using GpuSampling = GpuFused;

TEST_F(GpuSampling, DrawsTheTokensOfTheCpu) {
  const KernelTable cpu = table_of(any<SampleTokens>(), "cpu", at::kFloat, Target{});
  const KernelTable cuda =
      table_of(any<SampleTokens>(), "cuda.fused", at::kFloat, {Platform::kCuda});
  for (const c10::ScalarType type : {at::kBFloat16, at::kFloat}) {
    for (const auto& [batch, vocabulary] :
         {std::pair{3, 1}, {64, 300}, {3, 4096}, {5, 4097}, {64, 50000}, {8, 248320}}) {
      SampleTokens::Inputs in;
      in.logits = (randn({batch, vocabulary}, at::kFloat, 1) * 3).to(type);
      const at::Tensor row = at::arange(batch, at::kLong);
      const auto one_of = [&](int period, const at::Tensor& values) {
        return values.index_select(0, at::remainder(row, period).to(at::kLong));
      };
      // Every row another mixture of cuts.
      in.temperature = one_of(5, at::tensor({1.0, 0.0, 0.3, 2.0, 1.0}, at::kFloat));
      in.top_k = one_of(3, at::tensor({0, 20, 1}, at::kLong));
      in.top_p = one_of(4, at::tensor({1.0, 1.0, 0.9, 0.3}, at::kDouble));
      in.min_p = one_of(7, at::tensor({0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0}, at::kDouble));
      in.seeds = row * 1234567;
      in.positions = row + 9;
      in.support = 32;
      SampleTokens::Inputs there = in;
      for (at::Tensor* x : {&there.logits, &there.temperature, &there.top_p, &there.min_p,
                            &there.top_k, &there.seeds, &there.positions})
        *x = x->to(gpu());
      const SampleTokens::Tokens expected = sample_tokens(cpu, in),
                                 found = sample_tokens(cuda, there);
      EXPECT_TRUE(identical(found.ids.cpu(), expected.ids)) << batch << " x " << vocabulary;
      EXPECT_LE((found.logprobs.cpu() - expected.logprobs).abs().max().item<double>(), 2e-6)
          << vocabulary;
      EXPECT_LE(
          (found.sampled_logprobs.cpu() - expected.sampled_logprobs).abs().max().item<double>(),
          4e-6)
          << vocabulary;
      // More than 32 ids: which are told is open.
      const at::Tensor bounded = (in.top_k > 0).logical_or(in.temperature == 0).nonzero().view(-1);
      const auto sorted = [&](const at::Tensor& x) {
        return std::get<0>(x.index_select(0, bounded).sort(1));
      };
      EXPECT_TRUE(identical(sorted(found.supports.cpu()), sorted(expected.supports))) << vocabulary;
    }
  }
}

}  // namespace
}  // namespace heddle::ops::testing
