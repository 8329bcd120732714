// The kernels that go through libtorch's CUDA operators, against the reference in fp64 on the CPU.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <optional>

#include "ops/attention/attention.h"
#include "ops/builtin.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/moe/moe.h"
#include "ops/moe/shared_expert.h"
#include "ops/operator_support.h"
#include "ops/optimizer_step/eight_bit_state.h"
#include "ops/optimizer_step/optimizer_step.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rotary/rotary.h"

namespace heddle::ops::testing {
namespace {

const c10::Device kGpu(c10::DeviceType::CUDA, 0);

KernelTable gpu_table(const OpRequest& request, const std::string& name, c10::ScalarType dtype) {
  return table_of(request, name, dtype, {Platform::kCuda});
}

Tensors to_gpu(const Tensors& tensors, c10::ScalarType dtype) {
  Tensors moved;
  for (const at::Tensor& x : tensors) moved.push_back(x.to(kGpu, dtype));
  return moved;
}

class GpuOps : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or libtorch_cuda is not linked";
  }
};

/// The kernel of this name against the reference, on sequences of these boundaries.
void expect_attention_equals_reference(const std::string& name,
                                       const std::vector<std::int32_t>& q_boundaries,
                                       const std::vector<std::int32_t>& k_boundaries,
                                       std::int64_t dim) {
  // The reference sees the same bf16 values.
  Tensors in;
  const std::int64_t tq = q_boundaries.back(), tk = k_boundaries.back();
  for (const auto& [tokens, heads, seed] : {std::tuple{tq, 4, 1}, {tk, 2, 2}, {tk, 2, 3}}) {
    in.push_back(randn({tokens, heads, dim}, at::kBFloat16, static_cast<std::uint64_t>(seed))
                     .to(at::kDouble));
  }
  const auto run = [&](const KernelTable& kernels, c10::Device device) {
    const auto q = Sequences::from_host(q_boundaries, device);
    const auto k = Sequences::from_host(k_boundaries, device);
    return [&kernels, q, k](const Tensors& x) {
      return Tensors{attention(kernels, {x[0], x[1], x[2], q, k, 0})};
    };
  };
  const KernelTable reference = table_of(any<Attention>(), "reference", at::kDouble);
  const KernelTable kernel =
      gpu_table(OpRequest::of<Attention>({.head_dim = dim}), name, at::kBFloat16);
  const auto on_cpu = run(reference, c10::Device(c10::DeviceType::CPU));
  const auto on_gpu = run(kernel, kGpu);
  const Tensors gpu_in = to_gpu(in, at::kBFloat16);
  EXPECT_TRUE(close(on_gpu(gpu_in)[0].cpu(), on_cpu(in)[0], 1e-2)) << name << " " << dim;
  const Tensors actual = gradients_of(on_gpu, gpu_in), expected = gradients_of(on_cpu, in);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(close(actual[i].cpu(), expected[i], 2e-2))
        << name << " " << dim << " gradient " << i;
  }
}

TEST_F(GpuOps, FlashAttentionEqualsReference) {
  const std::vector<std::int32_t> q_ends = {0, 5, 70, 70, 335}, k_ends = {0, 205, 270, 275, 540};
  for (const std::int64_t dim : {64, 128, 256}) {
    expect_attention_equals_reference("cuda.flash_varlen", q_ends, q_ends, dim);
    expect_attention_equals_reference("cuda.flash_varlen", q_ends, k_ends, dim);
  }
}

TEST_F(GpuOps, CudnnAttentionEqualsReference) {
  const char* name = "cuda.sm90_cudnn_or_flash_varlen";
  for (const std::int64_t dim : {128, 256}) {
    expect_attention_equals_reference(name, {0, 256, 512}, {0, 256, 512}, dim);    // one length
    expect_attention_equals_reference(name, {0, 256, 1024}, {0, 256, 1024}, dim);  // two
    expect_attention_equals_reference(name, {0, 256, 768}, {0, 1024, 2048}, dim);  // more keys
    expect_attention_equals_reference(name, {0, 5, 335}, {0, 205, 540}, dim);
    expect_attention_equals_reference(name, {0, 5, 5}, {0, 205, 220}, dim);  // no queries
    expect_attention_equals_reference(name, {0, 9, 335}, {0, 5, 540}, dim);  // not cuDNN's
  }
}

TEST_F(GpuOps, CudnnAttentionTakesSequencesOfAnyLengths) {
  const char* name = "cuda.sm90_cudnn_or_flash_varlen";
  const std::vector<std::int32_t> lengths = {1, 29, 63, 64, 65, 0, 129, 700, 1, 300};
  std::vector<std::int32_t> ends = {0};
  for (const std::int32_t length : lengths) ends.push_back(ends.back() + length);
  for (const std::int64_t dim : {64, 72, 128, 256})  // 72 is not cuDNN's
    expect_attention_equals_reference(name, ends, ends, dim);
  // Fewer sequences of other lengths use the same plan; one of a single token stands alone.
  expect_attention_equals_reference(name, {0, 700, 703, 720, 750, 751, 900, 901, 902},
                                    {0, 700, 703, 720, 750, 751, 900, 901, 902}, 256);
  expect_attention_equals_reference(name, {0, 1}, {0, 1}, 256);
}

// As context parallelism cuts them.
TEST_F(GpuOps, CudnnAttentionTakesFewLongSequencesInPieces) {
  const char* name = "cuda.sm90_cudnn_or_flash_varlen";
  for (const std::int64_t dim : {128, 256})
    expect_attention_equals_reference(name, {0, 2048, 4352}, {0, 2048, 6912}, dim);
}

TEST_F(GpuOps, CudnnAttentionReadsColumnsOfAProjection) {
  const std::vector<std::int32_t> ends = {0, 70, 335, 600};
  const auto sequences = Sequences::from_host(ends, kGpu);
  const KernelTable kernels = gpu_table(OpRequest::of<Attention>({.head_dim = 256}),
                                        "cuda.sm90_cudnn_or_flash_varlen", at::kBFloat16);
  const auto run = [&](const Tensors& x) {
    return Tensors{attention(kernels, {x[0], x[1], x[2], sequences, sequences, 0})};
  };
  const at::Tensor all = randn({600, 8, 256}, at::kBFloat16, 1).to(kGpu);
  const Tensors views = {all.narrow(1, 0, 4), all.narrow(1, 4, 2), all.narrow(1, 6, 2)};
  Tensors copies;
  for (const at::Tensor& x : views) copies.push_back(x.clone());
  EXPECT_TRUE(identical(run(views)[0].cpu(), run(copies)[0].cpu()));
  const Tensors of_views = gradients_of(run, views), of_copies = gradients_of(run, copies);
  for (std::size_t i = 0; i < 3; ++i)
    EXPECT_TRUE(close(of_views[i].cpu(), of_copies[i].cpu(), 1e-2)) << i;
}

TEST_F(GpuOps, ReferenceAttentionRunsInFp32) {
  const std::vector<std::int32_t> ends = {0, 33, 300};
  const Tensors in = {randn({300, 4, 64}, at::kFloat, 1), randn({300, 2, 64}, at::kFloat, 2),
                      randn({300, 2, 64}, at::kFloat, 3)};
  const KernelTable cpu = table_of(any<Attention>(), "reference", at::kFloat);
  const KernelTable gpu = gpu_table(any<Attention>(), "reference", at::kFloat);
  const auto run = [&](const KernelTable& kernels, c10::Device device, const Tensors& x) {
    const auto sequences = Sequences::from_host(ends, device);
    return attention(kernels, {x[0], x[1], x[2], sequences, sequences, 0});
  };
  const Tensors gpu_in = to_gpu(in, at::kFloat);
  EXPECT_TRUE(close(run(gpu, kGpu, gpu_in).cpu(), run(cpu, c10::Device(at::kCPU), in), 1e-5));
}

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
          moe_experts_branch(kernels, {x[0], x[1], some, x[2], x[3], {}, {}, assignments});
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
  // Experts of one row up to some hundred, and one whose rows are several tiles.
  for (const auto& [tokens, k, experts] :
       {std::tuple{0, 2, 4}, {1, 1, 3}, {333, 4, 32}, {1100, 2, 3}}) {
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

void expect_low_rank_changes_equal_reference(const GroupedKernel& kernel) {
  SCOPED_TRACE(kernel.name);
  const std::int64_t width = kernel.intermediate_size;
  // A rank that is no multiple of 8 is padded; experts without a row keep zero gradients.
  for (const auto& [tokens, experts, rank] : {std::tuple{333, 32, 16}, {50, 3, 5}, {2, 8, 8}}) {
    const MoeRouting routing = moe_route(randn({tokens, experts}, at::kDouble, 1), 2, true);
    Tensors in = {randn({tokens, 64}, at::kBFloat16, 2),
                  routing.weights,
                  randn({experts, rank, 64}, at::kBFloat16, 5) * 0.2,
                  randn({experts, 2 * width, rank}, at::kBFloat16, 6) * 0.2,
                  randn({experts, rank, width}, at::kBFloat16, 7) * 0.2,
                  randn({experts, 64, rank}, at::kBFloat16, 8) * 0.2};
    for (at::Tensor& x : in) x = x.to(at::kBFloat16).to(at::kDouble);
    const at::Tensor gate_up = randn({experts, 2 * width, 64}, at::kBFloat16, 3) * 0.2,
                     down = randn({experts, 64, width}, at::kBFloat16, 4) * 0.2;
    const KernelTable reference = table_of(any<MoeExperts>(), "reference", at::kDouble);
    const KernelTable grouped = grouped_experts(kernel);
    const auto run = [&](const KernelTable& kernels, const at::Tensor& chosen, const Tensors& w) {
      return [&kernels, chosen, w](const Tensors& x) {
        return Tensors{
            moe_experts(kernels, {x[0], x[1], chosen, w[0], w[1], {x[2], x[3]}, {x[4], x[5]}})};
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
  for (const GroupedKernel& kernel : kGroupedKernels)
    expect_low_rank_changes_equal_reference(kernel);
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

TEST_F(GpuOps, LinearCrossEntropyEqualsReference) {
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    LinearCrossEntropy::Inputs in;
    in.hidden = randn({300, 64}, dtype, 1);
    in.weight = randn({1000, 64}, dtype, 2) * 0.3;
    in.labels = (randn({300}, at::kDouble, 3).abs() * 200).to(at::kLong);
    in.labels.narrow(0, 10, 50).fill_(-100);
    in.loss_weights = randn({300}, at::kFloat, 4).abs();
    in.gradient_scale = 0.5;
    in.want_entropy = true;
    LinearCrossEntropy::Inputs wide = in, moved = in;
    wide.hidden = in.hidden.to(at::kDouble), wide.weight = in.weight.to(at::kDouble);
    moved.hidden = in.hidden.to(kGpu), moved.weight = in.weight.to(kGpu);
    moved.labels = in.labels.to(kGpu), moved.loss_weights = in.loss_weights.to(kGpu);
    const auto expected = linear_cross_entropy(
        table_of(any<LinearCrossEntropy>(), "reference", at::kDouble), wide, true, true);
    const auto r = linear_cross_entropy(gpu_table(any<LinearCrossEntropy>(), "reference", dtype),
                                        moved, true, true);
    const double tolerance = dtype == at::kFloat ? 1e-5 : 1e-2;
    EXPECT_TRUE(close(r.loss_sum.cpu(), expected.loss_sum, 1e-5));
    EXPECT_TRUE(close(r.logprobs.cpu(), expected.logprobs, 1e-5));
    EXPECT_TRUE(close(r.entropy.cpu(), expected.entropy, 1e-5));
    EXPECT_TRUE(close(r.grad_hidden.cpu(), expected.grad_hidden, tolerance));
    EXPECT_TRUE(close(r.grad_weight.cpu(), expected.grad_weight, tolerance));
  }
}

TEST_F(GpuOps, FusedAdamwEqualsReference) {
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    std::vector<AdamwTensor> cpu, gpu;
    // More tensors than one launch takes, and sizes that are no multiple of a vector.
    std::vector<std::int64_t> sizes = {1, 0, 1023, 70001};
    for (std::int64_t i = 0; i < 130; ++i) sizes.push_back(2 + 7 * i);
    for (const std::int64_t size : sizes) {
      AdamwTensor t;
      t.parameter = randn({size}, at::kFloat, static_cast<std::uint64_t>(size));
      t.exp_avg = at::zeros({size}), t.exp_avg_sq = at::zeros({size});
      t.weight_decay = size > 10 ? 0.1 : 0;
      AdamwTensor moved = t;
      moved.parameter = t.parameter.to(kGpu), moved.exp_avg = t.exp_avg.to(kGpu);
      moved.exp_avg_sq = t.exp_avg_sq.to(kGpu);
      if (dtype == at::kBFloat16) {
        t.master = t.parameter, t.parameter = t.master.to(dtype);
        moved.master = moved.parameter, moved.parameter = moved.master.to(dtype);
      }
      cpu.push_back(t), gpu.push_back(moved);
    }
    AdamwOptions options;
    options.lr = 1e-3;
    options.gradient_multiplier = 0.5;
    for (int step = 1; step <= 5; ++step) {
      options.step = step;
      for (std::size_t i = 0; i < cpu.size(); ++i) {
        cpu[i].gradient = randn(cpu[i].parameter.sizes(), dtype, 10 * step + i);
        gpu[i].gradient = cpu[i].gradient.to(kGpu);
      }
      adamw_step(table_of(any<AdamwStep>(), "reference", dtype), cpu, options);
      adamw_step(gpu_table(any<AdamwStep>(), "cuda.fused", dtype), gpu, options);
    }
    for (std::size_t i = 0; i < cpu.size(); ++i) {
      const bool half = dtype == at::kBFloat16;
      EXPECT_TRUE(close((half ? gpu[i].master : gpu[i].parameter).cpu(),
                        half ? cpu[i].master : cpu[i].parameter, 1e-6));
      if (half) {
        EXPECT_TRUE(identical(gpu[i].parameter.cpu(), gpu[i].master.cpu().to(dtype)));
      }
    }
  }
}

TEST_F(GpuOps, RoundedAdamwEqualsReference) {
  for (const c10::ScalarType gradient : {at::kFloat, at::kBFloat16}) {
    std::vector<AdamwTensor> cpu, gpu;
    // More tensors than one launch takes, and sizes that are no multiple of a vector.
    for (std::int64_t i = 0; i < 70; ++i) {
      const std::int64_t size = i == 3 ? 0 : i == 5 ? 100003 : 1 + 37 * i;
      AdamwTensor t;
      t.parameter = randn({size}, at::kBFloat16, 4 * i);
      t.gradient = randn({size}, gradient, 4 * i + 1);
      t.exp_avg = randn({size}, at::kBFloat16, 4 * i + 2);
      t.exp_avg_sq = randn({size}, at::kBFloat16, 4 * i + 3).abs();
      t.weight_decay = i % 2 == 0 ? 0.1 : 0;
      t.rounding_key = 0x123456789abcdefu * (i + 1);
      AdamwTensor moved = t;
      moved.parameter = t.parameter.to(kGpu), moved.gradient = t.gradient.to(kGpu);
      moved.exp_avg = t.exp_avg.to(kGpu), moved.exp_avg_sq = t.exp_avg_sq.to(kGpu);
      cpu.push_back(t), gpu.push_back(moved);
    }
    AdamwOptions options;
    options.lr = 1e-2, options.step = 7, options.gradient_multiplier = 0.5;
    adamw_step(table_of(any<AdamwStep>(), "reference", at::kBFloat16), cpu, options);
    adamw_step(gpu_table(any<AdamwStep>(), "cuda.fused", at::kBFloat16), gpu, options);
    std::int64_t differing = 0, count = 0;
    for (std::size_t i = 0; i < cpu.size(); ++i) {
      for (const auto& [a, b] : {std::pair{cpu[i].parameter, gpu[i].parameter},
                                 {cpu[i].exp_avg, gpu[i].exp_avg},
                                 {cpu[i].exp_avg_sq, gpu[i].exp_avg_sq}}) {
        // Random bits are equal; fp32 sums that differ in the last place may round apart.
        EXPECT_TRUE(close(b.cpu(), a, 8e-3)) << i;
        differing += (b.cpu() != a).sum().item().toLong();
        count += a.numel();
      }
    }
    EXPECT_LT(differing, count / 1000) << "of " << count;
  }
}

TEST_F(GpuOps, EightBitAdamwEqualsReference) {
  for (const c10::ScalarType parameter : {at::kFloat, at::kBFloat16}) {
    for (const c10::ScalarType gradient : {at::kFloat, at::kBFloat16}) {
      std::vector<AdamwTensor> cpu, gpu;
      // More tensors than one launch takes, one without rows, magnitudes over many decades.
      for (std::int64_t i = 0; i < 90; ++i) {
        const std::vector<std::int64_t> sizes = {i == 3 ? 0 : 1 + i % 7, i == 5 ? 8192 : 256};
        AdamwTensor t;
        t.parameter = randn(sizes, parameter, 4 * i);
        t.exp_avg = eight_bit::zero_codes(t.parameter);
        t.exp_avg_sq = eight_bit::zero_codes(t.parameter);
        t.exp_avg_scale = eight_bit::zero_scales(t.parameter);
        t.exp_avg_sq_scale = eight_bit::zero_scales(t.parameter);
        t.weight_decay = i % 2 == 0 ? 0.1 : 0;
        t.rounding_key = 0x123456789abcdefu * (i + 1);
        AdamwTensor moved = t;
        for (const auto member :
             {&AdamwTensor::parameter, &AdamwTensor::exp_avg, &AdamwTensor::exp_avg_sq,
              &AdamwTensor::exp_avg_scale, &AdamwTensor::exp_avg_sq_scale})
          moved.*member = (t.*member).to(kGpu);
        cpu.push_back(t), gpu.push_back(moved);
      }
      AdamwOptions options;
      options.lr = 1e-2, options.gradient_multiplier = 0.5;
      for (options.step = 1; options.step <= 3; ++options.step) {
        for (std::size_t i = 0; i < cpu.size(); ++i) {
          const auto sizes = cpu[i].parameter.sizes();
          const auto seed = static_cast<std::int64_t>(1000 * i) + options.step;
          cpu[i].gradient =
              (randn(sizes, at::kFloat, seed) * randn(sizes, at::kFloat, seed + 500).mul_(3).exp_())
                  .to(gradient);
          gpu[i].gradient = cpu[i].gradient.to(kGpu);
        }
        adamw_step(table_of(any<AdamwStep>(), "reference", parameter), cpu, options);
        adamw_step(gpu_table(any<AdamwStep>(), "cuda.fused", parameter), gpu, options);
      }
      std::int64_t differing = 0, count = 0;
      for (std::size_t i = 0; i < cpu.size(); ++i) {
        for (const auto member : {&AdamwTensor::exp_avg, &AdamwTensor::exp_avg_sq}) {
          // Random bits are equal; fp32 sums that differ in the last place may round apart.
          differing += ((gpu[i].*member).cpu() != cpu[i].*member).sum().item().toLong();
          count += (cpu[i].*member).numel();
        }
        EXPECT_TRUE(close(gpu[i].exp_avg_scale.cpu(), cpu[i].exp_avg_scale, 1e-5)) << i;
        EXPECT_TRUE(close(gpu[i].exp_avg_sq_scale.cpu(), cpu[i].exp_avg_sq_scale, 1e-5)) << i;
        EXPECT_TRUE(close(gpu[i].parameter.cpu(), cpu[i].parameter, 8e-3)) << i;
      }
      EXPECT_LT(differing, count / 1000) << "of " << count;
    }
  }
}

TEST_F(GpuOps, NormAndRopeRunOnTheDevice) {
  const Tensors in = {randn({37, 3, 64}, at::kFloat, 1), randn({64}, at::kFloat, 2)};
  const auto positions = at::zeros({37}, at::kLong) + 5;
  const auto run = [&](const KernelTable& kernels, c10::Device device) {
    auto [cos, sin] = rotary_tables(positions.to(device), 16, 1e4, {}, at::kFloat);
    return [&kernels, cos = cos, sin = sin](const Tensors& x) {
      return Tensors{qk_norm_rope(kernels, x[0], x[1], cos, sin, 1e-6)};
    };
  };
  const KernelTable cpu = table_of(any<QkNormRope>(), "reference", at::kFloat);
  const KernelTable gpu = gpu_table(any<QkNormRope>(), "reference", at::kFloat);
  const auto on_cpu = run(cpu, c10::Device(at::kCPU)), on_gpu = run(gpu, kGpu);
  const Tensors gpu_in = to_gpu(in, at::kFloat);
  EXPECT_TRUE(close(on_gpu(gpu_in)[0].cpu(), on_cpu(in)[0], 1e-5));
  const Tensors actual = gradients_of(on_gpu, gpu_in), expected = gradients_of(on_cpu, in);
  EXPECT_TRUE(close(actual[0].cpu(), expected[0], 1e-5));
  EXPECT_TRUE(close(actual[1].cpu(), expected[1], 1e-5));
}

}  // namespace
}  // namespace heddle::ops::testing
