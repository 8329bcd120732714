// Kernels of experts and routers on a CUDA device against the reference in fp64 on the CPU.
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <optional>

#include "ops/gpu_ops.h"
#include "ops/moe/moe.h"
#include "ops/moe/shared_expert.h"
#include "ops/optimizer_step/optimizer_step.h"

namespace heddle::ops::testing {
namespace {

struct GroupedKernel {
  const char* name;
  std::int64_t intermediate_size;
};
constexpr GroupedKernel kGroupedKernels[] = {{"cuda.grouped_mm", 48}, {"cuda.sm90.grouped", 64}};

KernelTable grouped_experts(const GroupedKernel& kernel) {
  return gpu_table(
      OpRequest::of<MoeExperts>({.hidden_size = 64, .intermediate_size = kernel.intermediate_size}),
      kernel.name, at::kBFloat16);
}

at::Tensor expert_rows(std::int64_t tokens) { return randn({tokens, 64}, at::kBFloat16, 2); }

/// Outputs and gradients; the gradients of a second run bit by bit. `assignments` of `chosen` are
/// to one of the experts, if set.
void expect_experts_equal_reference(const GroupedKernel& kernel, const at::Tensor& weights,
                                    const at::Tensor& chosen, std::int64_t experts,
                                    std::optional<std::int64_t> assignments) {
  SCOPED_TRACE(kernel.name);
  const std::int64_t tokens = chosen.size(0), width = kernel.intermediate_size;
  Tensors in = {expert_rows(tokens), weights,
                randn({experts, 2 * width, 64}, at::kBFloat16, 3) * 0.2,
                randn({experts, 64, width}, at::kBFloat16, 4) * 0.2};
  for (at::Tensor& x : in) x = x.to(at::kBFloat16).to(at::kDouble);
  const KernelTable reference = table_of(any<MoeExperts>(), "reference", at::kDouble),
                    grouped = grouped_experts(kernel);
  const auto run = [&](const KernelTable& kernels, const at::Tensor& some) {
    return [&kernels, some, assignments](const Tensors& x) {
      const auto [y, same] =
          moe_experts_branch(kernels, {x[0], x[1], some, x[2], x[3], {}, assignments});
      return Tensors{y, same * 0.5};
    };
  };
  const auto on_cpu = run(reference, chosen);
  const auto on_gpu = run(grouped, chosen.to(kGpu));
  const Tensors gpu_in = to_gpu(in, at::kBFloat16);
  EXPECT_TRUE(close(on_gpu(gpu_in)[0].cpu(), on_cpu(in)[0], 2e-2));
  const Tensors actual = gradients_of(on_gpu, gpu_in), expected = gradients_of(on_cpu, in),
                again = gradients_of(on_gpu, gpu_in);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(close(actual[i].cpu(), expected[i], 3e-2)) << tokens << " gradient " << i;
    EXPECT_TRUE(identical(actual[i].cpu(), again[i].cpu())) << tokens << " gradient " << i;
  }
}

TEST_F(GpuOps, SharedExpertSumEqualsReference) {
  const KernelTable reference = table_of(any<SharedExpertSum>(), "reference", at::kDouble);
  const auto run = [](const KernelTable& kernels) {
    return [&kernels](const Tensors& x) {
      return Tensors{
          shared_expert_sum(kernels, x[0], x[1], x[2], x.size() > 3 ? x[3] : at::Tensor())};
    };
  };
  for (const auto& [tokens, width] : {std::pair{1, 8}, {9, 2048}, {300, 264}, {0, 64}}) {
    const KernelTable fused = gpu_table(OpRequest::of<SharedExpertSum>({.hidden_size = width}),
                                        "cuda.fused", at::kBFloat16);
    Tensors in = {randn({tokens, width}, at::kBFloat16, 1),
                  randn({tokens, width}, at::kBFloat16, 2), randn({tokens, 1}, at::kBFloat16, 3)};
    const Tensors gpu_in = to_gpu(in, at::kBFloat16);
    for (at::Tensor& x : in) x = x.to(at::kDouble);
    const at::Tensor y = run(fused)(gpu_in)[0].cpu();
    const at::Tensor residual = randn({tokens, width}, at::kBFloat16, 4);
    Tensors with_residual = in, gpu_with_residual = gpu_in;
    with_residual.push_back(residual.to(at::kDouble));
    gpu_with_residual.push_back(residual.to(kGpu));
    if (tokens == 0) {
      EXPECT_EQ(y.numel(), 0);
      continue;
    }
    EXPECT_TRUE(close(y, run(reference)(in)[0], 1e-2)) << tokens << " x " << width;
    EXPECT_TRUE(
        close(run(fused)(gpu_with_residual)[0].cpu(), run(reference)(with_residual)[0], 1e-2))
        << tokens << " x " << width;
    const Tensors actual = gradients_of(run(fused), gpu_with_residual),
                  expected = gradients_of(run(reference), with_residual),
                  again = gradients_of(run(fused), gpu_with_residual);
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(close(actual[i].cpu(), expected[i], 1e-2)) << tokens << " gradient " << i;
      EXPECT_TRUE(identical(actual[i].cpu(), again[i].cpu())) << tokens << " gradient " << i;
    }
  }
}

TEST_F(GpuOps, GroupedExpertsEqualReference) {
  // Experts of one row up to some hundred, one with rows for the largest tile, and one whose rows
  // are several tiles.
  for (const auto& [tokens, k, experts] :
       {std::tuple{0, 2, 4}, {1, 1, 3}, {333, 4, 32}, {270, 1, 1}, {1100, 2, 3}}) {
    const MoeRouting routing = moe_route(randn({tokens, experts}, at::kDouble, 1), k, true);
    for (const GroupedKernel& kernel : kGroupedKernels)
      expect_experts_equal_reference(kernel, routing.weights, routing.experts, experts, {});
  }
}

TEST_F(GpuOps, GroupedExpertsLeaveOutAssignmentsToNoExpert) {
  for (const auto& [tokens, k, experts, share] :
       {std::tuple{333, 4, 32, 0.5}, {1000, 8, 128, 0.1}, {9, 1, 3, 0.0}, {65, 2, 5, 1.0}}) {
    const MoeRouting routing = moe_route(randn({tokens, experts}, at::kDouble, 1), k, true);
    const at::Tensor is_none = randn({tokens, k}, at::kDouble, 9).sigmoid() >= share;
    const at::Tensor chosen = routing.experts.masked_fill(is_none, experts);
    const std::int64_t assignments = tokens * k - is_none.sum().item().toLong();
    for (const GroupedKernel& kernel : kGroupedKernels)
      expect_experts_equal_reference(kernel, routing.weights, chosen, experts, assignments);

    const MoeOrder order = moe_order(chosen, experts, assignments),
                   there = moe_order(chosen.to(kGpu), experts, assignments);
    EXPECT_EQ(there.starts, order.starts);
    EXPECT_TRUE(identical(there.token.cpu(), order.token));
    const MoeExperts::Functions functions = grouped_experts(kGroupedKernels[0]).get<MoeExperts>();
    const at::Tensor x = expert_rows(tokens), rows = functions.gather(x.to(kGpu), there.source, k);
    EXPECT_TRUE(identical(rows.cpu(), gather_rows(x, order.source, k)));
    EXPECT_TRUE(close(functions.sum(rows, there.place, k).cpu(),
                      sum_rows(rows.cpu().to(at::kDouble), there.place.cpu(), k), 1e-2));
  }
}

TEST_F(GpuOps, RouterEqualsReference) {
  for (const auto& [tokens, experts, k] : {std::tuple{0, 4, 2},
                                           {1, 1, 1},
                                           {7, 6, 3},
                                           {65, 32, 32},
                                           {33, 65, 1},
                                           {129, 256, 8},
                                           {5, 512, 10},
                                           {3, 1000, 4}}) {
    for (const bool normalize : {true, false}) {
      SCOPED_TRACE(::testing::Message() << k << " of " << experts << ", " << tokens << " tokens");
      const KernelTable warp = gpu_table(
          OpRequest::of<MoeRoute>({.num_experts = experts, .top_k = k}), "cuda.warp", at::kFloat);
      const at::Tensor logits = randn({tokens, experts}, at::kFloat, 1),
                       dp = randn({tokens, experts}, at::kDouble, 2);
      const MoeRouting expected = moe_route(logits.to(at::kDouble), k, normalize),
                       actual = moe_route(warp, logits.to(kGpu), k, normalize);
      EXPECT_TRUE(identical(actual.experts.cpu(), expected.experts));
      EXPECT_TRUE(close(actual.weights.cpu(), expected.weights, 1e-5));
      EXPECT_TRUE(close(actual.probabilities.cpu(), expected.probabilities, 1e-5));
      // Gradients of both outputs, of the experts chosen here and of others (router replay).
      for (const at::Tensor& chosen : {at::Tensor(), expected.experts.flip(0).contiguous()}) {
        const auto with = [&](const MoeRouting& r, const at::Tensor& d) {
          return Tensors{r.weights, r.probabilities * d.to(r.probabilities.options())};
        };
        const auto on_cpu = [&](const Tensors& x) {
          return with(moe_route(x[0], k, normalize, chosen), dp);
        };
        const auto on_gpu = [&](const Tensors& x) {
          const at::Tensor there = chosen.defined() ? chosen.to(kGpu) : chosen;
          return with(moe_route(warp, x[0], k, normalize, there), dp);
        };
        EXPECT_TRUE(close(gradients_of(on_gpu, {logits.to(kGpu)})[0].cpu(),
                          gradients_of(on_cpu, {logits.to(at::kDouble)})[0], 1e-4));
      }
    }
  }
  // Ties go to the lower index.
  const KernelTable warp = gpu_table(OpRequest::of<MoeRoute>({.num_experts = 70, .top_k = 5}),
                                     "cuda.warp", at::kBFloat16);
  const at::Tensor even = at::zeros({3, 70}, at::kBFloat16);
  EXPECT_TRUE(identical(moe_route(warp, even.to(kGpu), 5, true).experts.cpu(),
                        moe_route(even, 5, true).experts));
}

TEST_F(GpuOps, AnExpertThatDoesNotExistIsRefusedByTheOrder) {
  const at::Tensor chosen = at::zeros({5, 2}, at::kLong).to(kGpu);
  // 65,536 + 1 would be 1 in two bytes.
  for (const std::int64_t expert : {std::int64_t{-1}, std::int64_t{5}, std::int64_t{65537}}) {
    const at::Tensor wrong = chosen.clone();
    wrong[3][1].fill_(expert);
    EXPECT_THROW(moe_order(wrong, 4), c10::Error) << expert;
    EXPECT_THROW(moe_order(wrong, 4, 9), c10::Error) << expert;
  }
  chosen[3][1].fill_(4);
  EXPECT_EQ(moe_order(chosen, 4, 9).starts.back(), 9);
  EXPECT_THROW(moe_order(chosen, 4), c10::Error);
}

/// `is_shared`: one factor on the side of the hidden states for all experts.
void expect_low_rank_changes_equal_reference(const GroupedKernel& kernel, bool is_shared) {
  SCOPED_TRACE(fmt::format("{} {}", kernel.name, is_shared));
  const std::int64_t width = kernel.intermediate_size;
  // A rank that is no multiple of 8 is padded; experts without a row keep zero gradients.
  for (const auto& [tokens, experts, rank] : {std::tuple{333, 32, 16}, {50, 3, 5}, {2, 8, 8}}) {
    const MoeRouting routing = moe_route(randn({tokens, experts}, at::kDouble, 1), 2, true);
    const std::int64_t outer = is_shared ? 1 : experts;
    Tensors in = {randn({tokens, 64}, at::kBFloat16, 2),
                  routing.weights,
                  randn({outer, rank, 64}, at::kBFloat16, 5) * 0.2,
                  randn({experts, 2 * width, rank}, at::kBFloat16, 6) * 0.2,
                  randn({experts, rank, width}, at::kBFloat16, 7) * 0.2,
                  randn({outer, 64, rank}, at::kBFloat16, 8) * 0.2};
    for (at::Tensor& x : in) x = x.to(at::kBFloat16).to(at::kDouble);
    const at::Tensor gate_up = randn({experts, 2 * width, 64}, at::kBFloat16, 3) * 0.2,
                     down = randn({experts, 64, width}, at::kBFloat16, 4) * 0.2;
    const KernelTable reference = table_of(any<MoeExperts>(), "reference", at::kDouble);
    const KernelTable grouped = grouped_experts(kernel);
    const auto run = [&](const KernelTable& kernels, const at::Tensor& chosen, const Tensors& w) {
      return [&kernels, chosen, w](const Tensors& x) {
        return Tensors{
            moe_experts(kernels, {x[0], x[1], chosen, w[0], w[1], {{{x[2], x[3]}, {x[4], x[5]}}}})};
      };
    };
    const auto on_cpu =
        run(reference, routing.experts, {gate_up.to(at::kDouble), down.to(at::kDouble)});
    const auto on_gpu =
        run(grouped, routing.experts.to(kGpu), to_gpu({gate_up, down}, at::kBFloat16));
    const Tensors gpu_in = to_gpu(in, at::kBFloat16);
    EXPECT_TRUE(close(on_gpu(gpu_in)[0].cpu(), on_cpu(in)[0], 2e-2));
    const Tensors actual = gradients_of(on_gpu, gpu_in), expected = gradients_of(on_cpu, in);
    for (std::size_t i = 0; i < in.size(); ++i) {
      EXPECT_TRUE(close(actual[i].cpu(), expected[i], 3e-2)) << tokens << " gradient " << i;
    }
  }
}

TEST_F(GpuOps, GroupedExpertsWithLowRankChangesEqualReference) {
  for (const GroupedKernel& kernel : kGroupedKernels) {
    for (const bool is_shared : {false, true})
      expect_low_rank_changes_equal_reference(kernel, is_shared);
  }
}

/// Rows of sets of other ranks, of one that changes gate and up alone, and of none. `is_shared`: as
/// above, but of the third set.
void expect_sets_equal_reference(const GroupedKernel& kernel, bool is_shared) {
  SCOPED_TRACE(fmt::format("{} {}", kernel.name, is_shared));
  constexpr std::int64_t kTokens = 333, kExperts = 32;
  const std::int64_t width = kernel.intermediate_size;
  const MoeRouting routing = moe_route(randn({kTokens, kExperts}, at::kDouble, 1), 2, true);
  const auto factor = [](std::int64_t rows, std::int64_t columns, int seed, bool is_one = false) {
    return randn({is_one ? 1 : kExperts, rows, columns}, at::kBFloat16, seed) * 0.2;
  };
  Tensors in = {randn({kTokens, 64}, at::kBFloat16, 2),
                routing.weights,
                factor(16, 64, 5, is_shared),
                factor(2 * width, 16, 6),
                factor(16, width, 7),
                factor(64, 16, 8, is_shared),
                factor(5, 64, 9),
                factor(2 * width, 5, 10)};
  for (at::Tensor& x : in) x = x.to(at::kBFloat16).to(at::kDouble);
  const Tensors weights = {factor(2 * width, 64, 3), factor(64, width, 4)};
  const auto run = [](const KernelTable& kernels, const at::Tensor& chosen, const Tensors& w) {
    return [&kernels, chosen, w](const Tensors& x) {
      const std::vector<ExpertChanges> changes = {{{x[2], x[3]}, {x[4], x[5]}, 200},
                                                  {{}, {}, 30},
                                                  {{x[6], x[7]}, {}, 3},
                                                  {{x[2], x[3]}, {x[4], x[5]}, 100}};
      return Tensors{moe_experts(kernels, {x[0], x[1], chosen, w[0], w[1], changes})};
    };
  };
  const KernelTable reference = table_of(any<MoeExperts>(), "reference", at::kDouble),
                    grouped = grouped_experts(kernel);
  const auto on_cpu =
      run(reference, routing.experts, {weights[0].to(at::kDouble), weights[1].to(at::kDouble)});
  const auto on_gpu = run(grouped, routing.experts.to(kGpu), to_gpu(weights, at::kBFloat16));
  const Tensors gpu_in = to_gpu(in, at::kBFloat16);
  EXPECT_TRUE(close(on_gpu(gpu_in)[0].cpu(), on_cpu(in)[0], 2e-2));
  const Tensors actual = gradients_of(on_gpu, gpu_in), expected = gradients_of(on_cpu, in),
                again = gradients_of(on_gpu, gpu_in);
  for (std::size_t i = 0; i < in.size(); ++i) {
    EXPECT_TRUE(close(actual[i].cpu(), expected[i], 3e-2)) << "gradient " << i;
    EXPECT_TRUE(identical(actual[i].cpu(), again[i].cpu())) << "gradient " << i;
  }
}

TEST_F(GpuOps, GroupedExpertsOfSeveralSetsEqualReference) {
  for (const GroupedKernel& kernel : kGroupedKernels) {
    for (const bool is_shared : {false, true}) expect_sets_equal_reference(kernel, is_shared);
  }
}

TEST_F(GpuOps, RouterAuxiliaryLossAndNormRunOnTheDevice) {
  const at::Tensor logits = randn({65, 16}, at::kFloat, 1);
  const MoeRouting cpu = moe_route(logits, 4, true), gpu = moe_route(logits.to(kGpu), 4, true);
  EXPECT_TRUE(identical(gpu.experts.cpu(), cpu.experts));
  EXPECT_TRUE(close(gpu.weights.cpu(), cpu.weights, 1e-5));
  const auto loss = [&](const MoeRouting& r, c10::Device device) {
    return moe_auxiliary_loss(r.probabilities, r.experts, Sequences::from_host({0, 20, 65}, device),
                              60);
  };
  EXPECT_TRUE(close(loss(gpu, kGpu).cpu(), loss(cpu, c10::Device(at::kCPU)), 1e-5));
  EXPECT_NEAR(gradient_norm({logits.to(kGpu), logits.to(kGpu, at::kBFloat16)}),
              gradient_norm({logits, logits.to(at::kBFloat16)}), 1e-4);
}

}  // namespace
}  // namespace heddle::ops::testing
