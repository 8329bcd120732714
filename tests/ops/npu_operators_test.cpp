// The kernels of CANN's operators on the simulated NPU, against the references in double on the
// CPU.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "device/sim/simulation.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_decode.h"
#include "ops/builtin.h"
#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/gated_delta_rule_support.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/moe/moe.h"
#include "ops/operator_support.h"
#include "ops/optimizer_step/optimizer_step.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rotary/rotary.h"
#include "ops/swiglu/swiglu.h"
#include "testing/device.h"

namespace heddle::ops::testing {
namespace {

using heddle::testing::simulated_npu;

/// An operator as a function of its differentiable inputs, with one kernel on one device.
using Operator = std::function<Tensors(const KernelTable&, c10::Device, const Tensors&)>;

/// The kernel of that name.
KernelTable on_npu(const OpRequest& request, const std::string& kernel, c10::ScalarType dtype) {
  return table_of(request, kernel, dtype, {Platform::kSim, "Ascend910B3"});
}

class NpuOperators : public ::testing::TestWithParam<c10::ScalarType> {
 protected:
  c10::ScalarType dtype() const { return GetParam(); }

  /// Outputs and gradients of the NPU's kernel and of the reference in double.
  void expect_equal(const OpRequest& request, const std::string& kernel, const Tensors& inputs,
                    const Operator& run, double slack = 1) const {
    const c10::Device npu = simulated_npu(), cpu(at::kCPU);
    const auto results = [&](const KernelTable& table, c10::Device device, c10::ScalarType type) {
      Tensors there, outputs;
      for (const at::Tensor& x : inputs) {
        // Gates, states and loss weights are fp32 whatever the activations are.
        const bool is_wide = x.scalar_type() != dtype() && type != at::kDouble;
        there.push_back(x.to(device, is_wide ? x.scalar_type() : type));
      }
      Tensors gradients = gradients_of(
          [&](const Tensors& x) {
            const Tensors y = run(table, device, x);
            for (const at::Tensor& one : y) outputs.push_back(one.detach());
            return y;
          },
          there);
      outputs.insert(outputs.end(), gradients.begin(), gradients.end());
      for (at::Tensor& one : outputs) {
        if (one.defined()) one = one.cpu();
      }
      return outputs;
    };
    const Tensors found = results(on_npu(request, kernel, dtype()), npu, dtype());
    const Tensors expected = results(table_of(request, "reference", at::kDouble), cpu, at::kDouble);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i)
      EXPECT_TRUE(close(found[i], expected[i], slack * tolerance_of(dtype()))) << "result " << i;
  }
};

TEST_P(NpuOperators, AttentionOverPackedSequences) {
  const std::vector<std::int32_t> cu{0, 1, 1, 65, 194};
  const Operator run = [&](const KernelTable& kernels, c10::Device device, const Tensors& x) {
    const Sequences sequences = Sequences::from_host(cu, device);
    return Tensors{attention(kernels, {x[0], x[1], x[2], sequences, sequences, 0})};
  };
  for (const std::int64_t D : {64, 256}) {
    expect_equal(any<Attention>(), "npu.fusion_attention",
                 {randn({194, 4, D}, dtype(), 1), randn({194, 2, D}, dtype(), 2),
                  randn({194, 2, D}, dtype(), 3)},
                 run, 3);
  }
}

TEST_P(NpuOperators, AttentionOfLateQueriesSeesEarlierKeys) {
  const Operator run = [&](const KernelTable& kernels, c10::Device device, const Tensors& x) {
    return Tensors{attention(kernels, {x[0], x[1], x[2], Sequences::from_host({0, 3, 10}, device),
                                       Sequences::from_host({0, 40, 50}, device), 0.3})};
  };
  expect_equal(any<Attention>(), "npu.fusion_attention",
               {randn({10, 2, 32}, dtype(), 1), randn({50, 1, 32}, dtype(), 2),
                randn({50, 1, 32}, dtype(), 3)},
               run, 3);
}

TEST_P(NpuOperators, AttentionDecodeReadsTheCaches) {
  const c10::Device npu = simulated_npu();
  const at::Tensor q = randn({3, 4, 32}, dtype(), 1), k = randn({8, 8, 2, 32}, dtype(), 2),
                   v = randn({8, 8, 2, 32}, dtype(), 3);
  const at::Tensor fresh = randn({3, 2, 32}, dtype(), 4);
  const auto decode = [&](const KernelTable& kernels, c10::Device device, c10::ScalarType type) {
    const auto there = [&](const at::Tensor& x) { return x.to(device, type); };
    return attention_decode(
        kernels, {there(q), there(fresh), there(fresh), there(k), there(v), 0},
        CacheRows::from_host({4, 0, 2}, {19, 0, 7}, {{6, 1, 3}, {0}, {2}}, device));
  };
  const at::Tensor found =
      decode(on_npu(any<AttentionDecode>(), "npu.fusion_attention", dtype()), npu, dtype());
  const at::Tensor expected =
      decode(table_of(any<AttentionDecode>(), "reference", at::kDouble, Target{}),
             c10::Device(at::kCPU), at::kDouble);
  EXPECT_TRUE(close(found.cpu(), expected, 3 * tolerance_of(dtype())));
}

TEST_P(NpuOperators, AttentionDoesNotWaitForTheDevice) {
  const c10::Device npu = simulated_npu();
  const KernelTable kernels = on_npu(any<Attention>(), "npu.fusion_attention", dtype());
  const at::Tensor x = randn({70, 2, 32}, dtype(), 1).to(npu);
  const Sequences sequences = Sequences::from_host({0, 64, 70}, npu);
  const auto before = device::sim::waits();
  for (int i = 0; i < 2; ++i) attention(kernels, {x, x, x, sequences, sequences, 0});
  EXPECT_TRUE(device::sim::waits_since(before).empty());
}

TEST_P(NpuOperators, ZeroCentredNorms) {
  const Tensors inputs = {randn({3, 29, 96}, dtype(), 1), randn({3, 29, 96}, dtype(), 2),
                          randn({96}, dtype(), 3) * 0.02};
  expect_equal(any<RmsNorm>(), "npu.rms_norm", inputs,
               [](const KernelTable& kernels, c10::Device, const Tensors& x) {
                 const auto [y, sum] = add_rms_norm(kernels, x[0], x[1], x[2], 1e-6);
                 return Tensors{y, sum};
               });
  expect_equal(any<RmsNorm>(), "npu.rms_norm", {inputs[0], inputs[2]},
               [](const KernelTable& kernels, c10::Device, const Tensors& x) {
                 return Tensors{rms_norm(kernels, x[0], x[1], 1e-6)};
               });
}

TEST_P(NpuOperators, PlainNorms) {
  const Tensors inputs = {randn({3, 29, 96}, dtype(), 1), randn({96}, dtype(), 3) * 0.02 + 1};
  expect_equal(any<RmsNorm>(), "npu.rms_norm", inputs,
               [](const KernelTable& kernels, c10::Device, const Tensors& x) {
                 return Tensors{rms_norm(kernels, x[0], {x[1], 0}, 1e-6)};
               });
}

TEST_P(NpuOperators, NormAndRotationOfHeads) {
  for (const std::int64_t rotary : {16, 64}) {
    const at::Tensor angles = randn({31, rotary / 2}, at::kDouble, 4);
    const at::Tensor cos = angles.cos().to(dtype()), sin = angles.sin().to(dtype());
    expect_equal(
        any<QkNormRope>(), "npu.rotary_mul",
        {randn({31, 3, 64}, dtype(), 1), randn({64}, dtype(), 2) * 0.1},
        [&](const KernelTable& kernels, c10::Device device, const Tensors& x) {
          const auto wide = x[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
          return Tensors{
              qk_norm_rope(kernels, x[0], x[1], cos.to(device, wide), sin.to(device, wide), 1e-6)};
        },
        2);
  }
}

TEST_P(NpuOperators, SwigluOfColumnsAndOfSeparateTensors) {
  const Operator separate = [](const KernelTable& kernels, c10::Device, const Tensors& x) {
    return Tensors{swiglu(kernels, x[0], x[1])};
  };
  const Operator columns = [](const KernelTable& kernels, c10::Device, const Tensors& x) {
    return Tensors{swiglu(kernels, x[0].narrow(1, 0, 40), x[0].narrow(1, 40, 40))};
  };
  expect_equal(any<Swiglu>(), "npu.swiglu",
               {randn({33, 40}, dtype(), 1), randn({33, 40}, dtype(), 2)}, separate);
  expect_equal(any<Swiglu>(), "npu.swiglu", {randn({33, 80}, dtype(), 1)}, columns);
}

TEST_P(NpuOperators, CrossEntropyOfTheHead) {
  const c10::Device npu = simulated_npu();
  LinearCrossEntropy::Inputs in;
  in.hidden = randn({1050, 24}, dtype(), 1);
  in.weight = randn({57, 24}, dtype(), 2);
  in.labels = (randn({1050}, at::kDouble, 3).abs() * 10).to(at::kLong).clamp_max(56);
  for (std::int64_t i = 0; i < 1050; i += 3) in.labels[i].fill_(-100);
  in.loss_weights = randn({1050}, at::kFloat, 4).abs();
  in.gradient_scale = 0.37;
  in.want_entropy = true;
  LinearCrossEntropy::Inputs there = in, wide = in;
  there.hidden = in.hidden.to(npu);
  there.weight = in.weight.to(npu);
  there.labels = in.labels.to(npu);
  there.loss_weights = in.loss_weights.to(npu);
  wide.hidden = in.hidden.to(at::kDouble);
  wide.weight = in.weight.to(at::kDouble);
  const auto before = device::sim::waits();
  const auto found = linear_cross_entropy(
      on_npu(any<LinearCrossEntropy>(), "npu.cross_entropy_loss", dtype()), there, true, true);
  EXPECT_TRUE(device::sim::waits_since(before).empty()) << "rows without a label were looked for";
  const auto expected = linear_cross_entropy(
      table_of(any<LinearCrossEntropy>(), "reference", at::kDouble), wide, true, true);
  const double tolerance = tolerance_of(dtype());
  EXPECT_TRUE(close(found.loss_sum.cpu(), expected.loss_sum, tolerance));
  EXPECT_TRUE(close(found.logprobs.cpu(), expected.logprobs, tolerance));
  EXPECT_TRUE(close(found.entropy.cpu(), expected.entropy, tolerance));
  EXPECT_TRUE(close(found.grad_hidden.cpu(), expected.grad_hidden, 2 * tolerance));
  EXPECT_TRUE(close(found.grad_weight.cpu(), expected.grad_weight, 2 * tolerance));
}

TEST_P(NpuOperators, ConvolutionInPasses) {
  expect_equal(any<CausalConv1d>(), "npu.tiled",
               {randn({70, 200}, dtype(), 1), randn({200, 4}, dtype(), 2)},
               [](const KernelTable& kernels, c10::Device device, const Tensors& x) {
                 const auto sequences = Sequences::from_host({0, 1, 1, 66, 70}, device);
                 return Tensors{causal_conv1d(kernels, {x[0], x[1], {}, sequences, false}).y};
               });
}

TEST_P(NpuOperators, ChunksOfTheGatedDeltaRule) {
  const c10::Device npu = simulated_npu();
  for (const Case& c : {Case{{65, 0, 200, 1}, 2, 2, 32, 48}, Case{{129}, 1, 1, 128, 128}}) {
    const Problem p = make(c, dtype());
    const Tensors found =
        testing::run(on_device(p, npu), on_npu(any<GatedDeltaRule>(), "npu.chunk64", dtype()));
    const Tensors expected =
        testing::run(in_double(p), table_of(any<GatedDeltaRule>(), "cpu.sequential", at::kDouble));
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (expected[i].numel() == 0) continue;
      EXPECT_LE(rms_error(found[i].cpu(), expected[i]), dtype() == at::kBFloat16 ? 5e-3
                                                        : dtype() == at::kFloat  ? 1e-4
                                                                                 : 1e-12)
          << names()[i] << ", " << c.text();
    }
  }
}

TEST_P(NpuOperators, AdamwStepsLikeTheReference) {
  const c10::Device npu = simulated_npu();
  const auto make_tensors = [&](c10::Device device, c10::ScalarType wide) {
    AdamwTensor t;
    t.parameter = randn({7, 9}, dtype(), 1).to(device);
    t.gradient = randn({7, 9}, dtype(), 2).to(device);
    t.exp_avg = at::zeros({7, 9}, at::TensorOptions(device).dtype(wide));
    t.exp_avg_sq = at::zeros({7, 9}, at::TensorOptions(device).dtype(wide));
    if (dtype() == at::kBFloat16) t.master = t.parameter.to(wide);
    t.weight_decay = 0.1;
    return t;
  };
  const auto wide = dtype() == at::kDouble ? at::kDouble : at::kFloat;
  const AdamwTensor found = make_tensors(npu, wide), expected = make_tensors(at::kCPU, wide);
  const auto kernels = [&](const char* name, const Target& device) {
    return table_of(any<AdamwStep>(), name, dtype(), device);
  };
  for (std::int64_t step = 1; step <= 3; ++step) {
    AdamwOptions options;
    options.lr = 0.03;
    options.step = step;
    options.gradient_multiplier = 0.5;
    adamw_step(kernels("npu.apply_adam_w", {Platform::kSim}), {found}, options);
    adamw_step(kernels("reference", {}), {expected}, options);
  }
  const double tolerance = wide == at::kDouble ? 1e-12 : 3e-6;
  EXPECT_TRUE(close(found.exp_avg.cpu(), expected.exp_avg, tolerance));
  EXPECT_TRUE(close(found.exp_avg_sq.cpu(), expected.exp_avg_sq, tolerance));
  EXPECT_TRUE(close(found.parameter.cpu(), expected.parameter, tolerance_of(dtype())));
  if (found.master.defined()) {
    EXPECT_TRUE(close(found.master.cpu(), expected.master, tolerance));
  }
}

INSTANTIATE_TEST_SUITE_P(All, NpuOperators, ::testing::ValuesIn(kernel_dtypes()),
                         [](const auto& info) { return c10::toString(info.param); });

class NpuExperts : public NpuOperators {};

TEST_P(NpuExperts, EqualTheReferenceWithAndWithoutChanges) {
  // Eleven experts, of which some get no token.
  const MoeRouting routing = moe_route(randn({19, 11}, dtype(), 1), 3, true);
  const Tensors inputs = {randn({19, 16}, dtype(), 2),     routing.weights,
                          randn({11, 24, 16}, dtype(), 3), randn({11, 16, 12}, dtype(), 4),
                          randn({11, 3, 16}, dtype(), 5),  randn({11, 24, 3}, dtype(), 6),
                          randn({11, 2, 12}, dtype(), 7),  randn({11, 16, 2}, dtype(), 8)};
  const char* kernel = dtype() == at::kBFloat16 ? "npu.grouped_matmul" : "npu.product_per_expert";
  const Operator plain = [&](const KernelTable& kernels, c10::Device device, const Tensors& x) {
    return Tensors{moe_experts(kernels, {x[0], x[1], routing.experts.to(device), x[2], x[3]})};
  };
  const Operator changed = [&](const KernelTable& kernels, c10::Device device, const Tensors& x) {
    return Tensors{moe_experts(
        kernels,
        {x[0], x[1], routing.experts.to(device), x[2], x[3], {{{x[4], x[5]}, {x[6], x[7]}}}})};
  };
  expect_equal(any<MoeExperts>(), kernel, {inputs[0], inputs[1], inputs[2], inputs[3]}, plain, 3);
  expect_equal(any<MoeExperts>(), kernel, inputs, changed, 3);
  // One factor on the side of the hidden states for all experts.
  Tensors shared = inputs;
  for (const std::size_t i : {4, 7}) shared[i] = shared[i].narrow(0, 0, 1);
  expect_equal(any<MoeExperts>(), kernel, shared, changed, 3);
  // Two of three choices are to no expert, then all.
  const at::Tensor is_none = at::arange(19 * 3, at::kLong).remainder(3).view({19, 3}) > 0;
  for (const bool all : {false, true}) {
    const Operator holes = [&](const KernelTable& kernels, c10::Device device, const Tensors& x) {
      const at::Tensor some =
          all ? at::full({19, 3}, 11, at::kLong) : routing.experts.masked_fill(is_none, 11);
      return Tensors{moe_experts(
          kernels,
          {x[0], x[1], some.to(device), x[2], x[3], {{{x[4], x[5]}, {x[6], x[7]}}}, all ? 0 : 19})};
    };
    expect_equal(any<MoeExperts>(), kernel, inputs, holes, 3);
    expect_equal(any<MoeExperts>(), kernel, shared, holes, 3);
  }
}

INSTANTIATE_TEST_SUITE_P(All, NpuExperts, ::testing::ValuesIn(kernel_dtypes()),
                         [](const auto& info) { return c10::toString(info.param); });

TEST(NpuExpertsInBf16, DoNotWaitForTheDevice) {
  const c10::Device npu = simulated_npu();
  const auto experts = (randn({19, 3}, at::kDouble, 1).abs() * 3).to(at::kLong).clamp_max(7);
  const Tensors x = {
      randn({19, 16}, at::kBFloat16, 2).to(npu), randn({19, 3}, at::kBFloat16, 3).to(npu),
      randn({8, 24, 16}, at::kBFloat16, 4).to(npu), randn({8, 16, 12}, at::kBFloat16, 5).to(npu)};
  const at::Tensor there = experts.to(npu);
  const KernelTable kernels = on_npu(any<MoeExperts>(), "npu.grouped_matmul", at::kBFloat16);
  const auto before = device::sim::waits();
  gradients_of(
      [&](const Tensors& in) {
        return Tensors{moe_experts(kernels, {in[0], in[1], there, in[2], in[3]})};
      },
      x);
  // The gradient that gradients_of() sends.
  EXPECT_EQ(device::sim::waits_since(before), (device::sim::Counts{{"aten::_copy_from", 1}}));
}

class NativeGatedDeltaRule : public ::testing::Test {
 protected:
  NativeGatedDeltaRule() : npu_(simulated_npu()) {
    Case c;
    c.lengths = {65, 0, 30};
    c.Hk = 1;
    c.group = 2;
    c.K = c.V = 128;
    problem_ = make(c, at::kBFloat16);
    problem_.options.want_final_state = true;
  }
  KernelTable native() const {
    return on_npu(OpRequest::of<GatedDeltaRule>(
                      {.num_k_heads = 2, .num_v_heads = 4, .head_k_dim = 128, .head_v_dim = 128},
                      Use::kGeneration),
                  "npu.native", at::kBFloat16);
  }

  c10::Device npu_;
  Problem problem_;
};

TEST_F(NativeGatedDeltaRule, ReadsPromptsFromAndIntoFp32States) {
  const Problem there = on_device(problem_, npu_), wide = in_double(problem_);
  const at::Tensor state_before = there.inputs[5].cpu().clone();
  const Tensors found = call(there, native(), there.inputs);
  const Tensors expected =
      call(wide, table_of(any<GatedDeltaRule>(), "cpu.sequential", at::kDouble), wide.inputs);
  EXPECT_LE(rms_error(found[0].cpu(), expected[0]), 2e-2);
  EXPECT_LE(rms_error(found[1].cpu(), expected[1]), 2e-2);
  EXPECT_EQ(found[1].scalar_type(), at::kFloat);
  EXPECT_TRUE(identical(there.inputs[5].cpu(), state_before)) << "it wrote into the caller's state";
}

TEST_F(NativeGatedDeltaRule, RefusesToTrain) {
  const Problem there = on_device(problem_, npu_);
  EXPECT_THROW(testing::run(there, native()), c10::Error);
}

}  // namespace
}  // namespace heddle::ops::testing
