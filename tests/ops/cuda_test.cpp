// The kernels that go through libtorch's CUDA operators, against the reference in fp64 on the CPU.
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "ops/attention/attention.h"
#include "ops/builtin.h"
#include "ops/gpu_ops.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/optimizer_step/eight_bit_state.h"
#include "ops/optimizer_step/optimizer_step.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rotary/rotary.h"

namespace heddle::ops::testing {
namespace {

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

// A rank's part of a short parameter starts wherever the part before it ends.
TEST_F(GpuOps, AdamwTakesPartsThatStartAnywhere) {
  const at::Tensor numbers =
      at::tensor(std::vector<double>{1e-3, 1.2e-3, 3, 0.5, 7}, at::kDouble).to(kGpu);
  AdamwOptions options;
  options.on_device = numbers;
  for (const auto& [weight, state] : {std::pair{at::kFloat, at::kFloat},
                                      {at::kBFloat16, at::kFloat},
                                      {at::kBFloat16, at::kBFloat16}}) {
    std::vector<AdamwTensor> parts, others;
    for (const std::int64_t size : {1, 2, 3, 7, 8, 30, 4097}) {
      for (const std::int64_t begin : {1, 2, 5}) {
        const auto part = [&](c10::ScalarType dtype, std::uint64_t seed) {
          const at::Tensor whole = randn({size + 16}, dtype, seed + 10 * size).to(kGpu);
          return whole.narrow(0, begin, size);
        };
        AdamwTensor t;
        t.parameter = part(weight, 1);
        if (state != weight) t.master = part(at::kFloat, 2);
        t.gradient = part(size % 2 == 0 ? at::kFloat : at::kBFloat16, 3);
        t.exp_avg = part(state, 4), t.exp_avg_sq = part(state, 5).abs_();
        t.weight_decay = 0.1;
        t.rounding_key = 77 + static_cast<std::uint64_t>(size);
        AdamwTensor other = t;
        other.parameter = t.parameter.clone(), other.gradient = t.gradient.clone();
        other.exp_avg = t.exp_avg.clone(), other.exp_avg_sq = t.exp_avg_sq.clone();
        if (t.master.defined()) other.master = t.master.clone();
        parts.push_back(t), others.push_back(other);
      }
    }
    const KernelTable kernels = gpu_table(any<AdamwStep>(), "cuda.fused", weight);
    const at::Tensor before = parts.back().exp_avg.clone();
    adamw_step(kernels, parts, options);
    adamw_step(kernels, others, options);
    EXPECT_FALSE(at::equal(parts.back().exp_avg, before));
    for (std::size_t i = 0; i < parts.size(); ++i) {
      // Products and sums fuse in other places where elements go one by one.
      const double tolerance = state == at::kFloat ? 1e-6 : 0;
      EXPECT_TRUE(close(parts[i].exp_avg.cpu(), others[i].exp_avg.cpu(), tolerance)) << i;
      EXPECT_TRUE(close(parts[i].exp_avg_sq.cpu(), others[i].exp_avg_sq.cpu(), tolerance)) << i;
      const at::Tensor &a = parts[i].master, &b = others[i].master;
      EXPECT_TRUE(a.defined()
                      ? close(a.cpu(), b.cpu(), tolerance)
                      : close(parts[i].parameter.cpu(), others[i].parameter.cpu(), tolerance))
          << i;
    }
  }
}

/// Parameters of several owners with gradients: fp32 ones and bf16 ones with masters, more than one
/// launch takes, and sizes that are no multiple of a vector.
std::vector<AdamwGroup> groups_on_gpu() {
  std::vector<AdamwGroup> groups;
  for (std::int64_t g = 0; g < 5; ++g) {
    AdamwGroup group;
    group.options.lr = 1e-3 * static_cast<double>(g + 1);
    group.options.beta1 = 0.9 - 0.1 * static_cast<double>(g), group.options.beta2 = 0.95;
    group.options.eps = g == 2 ? 1e-12 : 1e-8;
    group.options.step = 1 + 3 * g;
    group.options.gradient_multiplier = g == 3 ? 0.25 : 1;
    // The second has none.
    for (std::int64_t i = 0; g != 1 && i < 70 + 20 * g; ++i) {
      const std::int64_t size = i == 7 ? 0 : i == 9 ? 70001 : 1 + 61 * i;
      const auto seed = static_cast<std::uint64_t>(1000 * g + 5 * i);
      AdamwTensor t;
      t.parameter = randn({size}, at::kFloat, seed).to(kGpu);
      if (i % 2 == 1) t.master = t.parameter, t.parameter = t.master.to(at::kBFloat16);
      t.gradient = randn({size}, i % 3 == 0 ? at::kFloat : at::kBFloat16, seed + 1).to(kGpu);
      t.exp_avg = randn({size}, at::kFloat, seed + 2).to(kGpu);
      t.exp_avg_sq = randn({size}, at::kFloat, seed + 3).abs().to(kGpu);
      t.weight_decay = g == 4 ? 0.1 : 0;
      group.tensors.push_back(t);
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

TEST_F(GpuOps, AdamwOfGroupsHasTheBitsOfEachAlone) {
  const KernelTable kernels = gpu_table(any<AdamwStep>(), "cuda.fused", at::kFloat);
  const std::vector<AdamwGroup> together = groups_on_gpu(), alone = groups_on_gpu();
  const at::Tensor before = together[0].tensors[9].parameter.clone();
  adamw_steps(kernels, together);
  for (const AdamwGroup& group : alone) adamw_step(kernels, group.tensors, group.options);
  EXPECT_FALSE(at::equal(together[0].tensors[9].parameter, before));
  for (std::size_t g = 0; g < together.size(); ++g) {
    for (std::size_t i = 0; i < together[g].tensors.size(); ++i) {
      const AdamwTensor &a = together[g].tensors[i], &b = alone[g].tensors[i];
      EXPECT_TRUE(identical(a.parameter.cpu(), b.parameter.cpu())) << g << " " << i;
      EXPECT_TRUE(identical(a.exp_avg.cpu(), b.exp_avg.cpu())) << g << " " << i;
      EXPECT_TRUE(identical(a.exp_avg_sq.cpu(), b.exp_avg_sq.cpu())) << g << " " << i;
      if (a.master.defined()) {
        EXPECT_TRUE(identical(a.master.cpu(), b.master.cpu())) << g << " " << i;
      }
    }
  }
}

TEST_F(GpuOps, LateMultipliersOfGroupsMayLeaveOneAsItIs) {
  const KernelTable kernels = gpu_table(any<AdamwStep>(), "cuda.fused", at::kFloat);
  const std::vector<AdamwGroup> together = groups_on_gpu();
  std::vector<AdamwGroup> alone = groups_on_gpu();
  const std::vector<double> late = {0.5, 1, std::numeric_limits<double>::quiet_NaN(), 2, 0.25};
  adamw_steps(kernels, together, [&] { return late; });
  for (std::size_t g = 0; g < alone.size(); ++g) {
    alone[g].options.gradient_multiplier = late[g];
    if (g != 2) adamw_step(kernels, alone[g].tensors, alone[g].options);
    for (std::size_t i = 0; i < alone[g].tensors.size(); ++i) {
      EXPECT_TRUE(
          identical(together[g].tensors[i].parameter.cpu(), alone[g].tensors[i].parameter.cpu()))
          << g << " " << i;
    }
  }
}

TEST_F(GpuOps, NormsOfGroupsHaveTheBitsOfEachAlone) {
  std::vector<std::vector<at::Tensor>> groups;
  std::vector<double> alone;
  for (const AdamwGroup& group : groups_on_gpu()) {
    groups.emplace_back();
    for (const AdamwTensor& tensor : group.tensors) groups.back().push_back(tensor.gradient);
    alone.push_back(gradient_norm(groups.back()));
  }
  EXPECT_EQ(gradient_norms(groups), alone);
  EXPECT_EQ(alone[1], 0);
  // A NaN is its group's alone.
  groups[2][9].fill_(std::numeric_limits<float>::quiet_NaN());
  const std::vector<double> found = gradient_norms(groups);
  for (std::size_t g = 0; g < found.size(); ++g) {
    if (g == 2) {
      EXPECT_TRUE(std::isnan(found[g]));
    } else {
      EXPECT_EQ(found[g], alone[g]);
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
