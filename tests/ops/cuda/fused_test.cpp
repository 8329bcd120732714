// The fused CUDA kernels of operators that work token by token, against the reference in fp64.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>

#include <limits>

#include "ops/attention/attention.h"
#include "ops/builtin.h"
#include "ops/cuda/fused_support.h"
#include "ops/gated_delta_net/gated_delta_net.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rotary/rotary.h"
#include "ops/swiglu/swiglu.h"

namespace heddle::ops::testing {
namespace {

const std::vector<c10::ScalarType> kTypes = {at::kBFloat16, at::kFloat};
const OpRequest kRmsNorm = any<RmsNorm>();
const OpRequest kGatedRmsNorm = any<GatedRmsNorm>();
const OpRequest kGates = any<GdnGates>();
const OpRequest kQkNormRope = any<QkNormRope>();
const OpRequest kSwiglu = any<Swiglu>();
const OpRequest kOutputGate = any<OutputGate>();

std::string shape_text(std::initializer_list<std::int64_t> sizes, c10::ScalarType dtype) {
  std::string text = c10::toString(dtype);
  for (const std::int64_t size : sizes) text += " " + std::to_string(size);
  return text;
}

at::Tensor values(at::IntArrayRef sizes, std::uint64_t seed) {
  return randn(sizes, at::kDouble, seed);
}

TEST_F(GpuFused, RmsNormEqualsReference) {
  const Operator plain = [](const KernelTable& kernels, const Tensors& in) {
    return Tensors{rms_norm(kernels, in[0], in[1], 1e-6)};
  };
  const Operator added = [](const KernelTable& kernels, const Tensors& in) {
    auto [y, sum] = add_rms_norm(kernels, in[0], in[2], in[1], 1e-6);
    return Tensors{y, sum};
  };
  for (const c10::ScalarType dtype : kTypes) {
    for (const auto& [rows, width] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 64},
                                                            {1, 8},
                                                            {3, 3},
                                                            {129, 257},
                                                            {700, 1024},
                                                            {65, 2560},
                                                            {5, 4104},
                                                            {3, 8192},
                                                            {5000, 16},
                                                            {17, 1500},
                                                            {3, 3001}}) {
      SCOPED_TRACE(shape_text({rows, width}, dtype));
      const at::Tensor x = values({rows, width}, 1), w = values({width}, 2) * 0.3;
      expect_fused_equals_reference(kRmsNorm, plain, {x, w}, dtype);
      expect_fused_equals_reference(kRmsNorm, added, {x, w, values({rows, width}, 3)}, dtype);
    }
  }
}

TEST_F(GpuFused, RmsNormReadsOnlyItsViewAndRefusesLongRows) {
  for (const c10::ScalarType dtype : kTypes) {
    const KernelTable fused = fused_table(kRmsNorm, dtype);
    const at::Tensor x = values({3, 4, 64}, 5).to(gpu(), dtype),
                     w = values({64}, 6).to(gpu(), dtype);
    for (const std::int64_t gap : {5, 8}) {
      const at::Tensor y = rms_norm(fused, with_poisoned_gaps(x, gap), w, 1e-6);
      // A gap of 5 makes the accesses narrow and the sums run in another order.
      EXPECT_TRUE(close(y.cpu(), rms_norm(fused, x, w, 1e-6).cpu(), fused_tolerance(dtype))) << gap;
      EXPECT_EQ(y.sizes(), x.sizes());
    }
  }
  EXPECT_THROW(
      table_of(OpRequest::of<RmsNorm>({.dim = 16384}), "cuda.fused", at::kFloat, {Platform::kCuda}),
      std::exception);
}

TEST_F(GpuFused, GatedRmsNormEqualsReference) {
  const Operator run = [](const KernelTable& kernels, const Tensors& in) {
    return Tensors{gated_rms_norm(kernels, in[0], in[1], in[2], 1e-6)};
  };
  for (const c10::ScalarType dtype : kTypes) {
    for (const auto& [tokens, heads, width] :
         std::vector<std::array<std::int64_t, 3>>{{0, 2, 128},
                                                  {1, 1, 128},
                                                  {333, 3, 128},
                                                  {1025, 16, 128},
                                                  {29, 5, 64},
                                                  {40, 2, 256},
                                                  {31, 3, 17},
                                                  {10, 1, 129}}) {
      SCOPED_TRACE(shape_text({tokens, heads, width}, dtype));
      expect_fused_equals_reference(kGatedRmsNorm, run,
                                    {values({tokens, heads, width}, 1),
                                     values({tokens, heads, width}, 2) * 3, values({width}, 3)},
                                    dtype);
    }
  }
}

TEST_F(GpuFused, GatedRmsNormTakesColumnsOfAProjection) {
  for (const c10::ScalarType dtype : kTypes) {
    const KernelTable fused = fused_table(kGatedRmsNorm, dtype);
    const at::Tensor x = values({37, 4, 64}, 1).to(gpu(), dtype),
                     z = values({37, 4, 64}, 2).to(gpu(), dtype),
                     w = values({64}, 3).to(gpu(), dtype);
    const at::Tensor flat = with_poisoned_gaps(z.view({37, 256}), 64);
    const at::Tensor columns = flat.view({37, 4, 64});
    const at::Tensor expected = gated_rms_norm(fused, x, z, w, 1e-6);
    EXPECT_TRUE(identical(gated_rms_norm(fused, x, columns, w, 1e-6).cpu(), expected.cpu()));
    // Narrow accesses sum in another order.
    EXPECT_TRUE(close(gated_rms_norm(fused, x, with_poisoned_gaps(z), w, 1e-6).cpu(),
                      expected.cpu(), fused_tolerance(dtype)));
  }
}

TEST_F(GpuFused, GatesEqualReference) {
  const Operator run = [](const KernelTable& kernels, const Tensors& in) {
    auto [g, beta] = gdn_gates(kernels, in[0], in[1], in[2], in[3]);
    return Tensors{g, beta};
  };
  for (const c10::ScalarType dtype : kTypes) {
    for (const auto& [tokens, heads] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {0, 4}, {1, 1}, {1000, 16}, {65, 48}, {333, 3}, {20, 300}}) {
      SCOPED_TRACE(shape_text({tokens, heads}, dtype));
      // Inputs up to where softplus is the identity and sigmoid saturates.
      expect_fused_equals_reference(kGates, run,
                                    {values({tokens, heads}, 1) * 8, values({tokens, heads}, 2) * 8,
                                     values({heads}, 3), values({heads}, 4)},
                                    dtype);
    }
  }
}

TEST_F(GpuFused, GatesFlowBackFromEitherOutput) {
  const Tensors in =
      on_gpu({values({50, 6}, 1), values({50, 6}, 2), values({6}, 3), values({6}, 4)}, at::kFloat);
  const KernelTable fused = fused_table(kGates, at::kFloat);
  const auto only = [&](int output) {
    return gradients_of(
        [&](const Tensors& x) {
          auto [g, beta] = gdn_gates(fused, x[0], x[1], x[2], x[3]);
          return Tensors{output == 0 ? g : beta};
        },
        in);
  };
  const Tensors from_g = only(0), from_beta = only(1);
  EXPECT_TRUE(from_g[0].defined() && !from_g[1].defined() && from_g[2].defined());
  EXPECT_TRUE(!from_beta[0].defined() && from_beta[1].defined() && !from_beta[3].defined());
}

TEST_F(GpuFused, QkNormRopeEqualsReference) {
  for (const c10::ScalarType dtype : kTypes) {
    for (const auto& [tokens, heads, width, rotary] :
         std::vector<std::array<std::int64_t, 4>>{{0, 2, 256, 64},
                                                  {1, 1, 256, 64},
                                                  {777, 8, 256, 64},
                                                  {100, 3, 128, 32},
                                                  {45, 2, 64, 64},
                                                  {33, 2, 64, 24},
                                                  {21, 5, 40, 8},
                                                  {19, 3, 20, 10},
                                                  {7, 2, 150, 150}}) {
      SCOPED_TRACE(shape_text({tokens, heads, width, rotary}, dtype));
      const at::Tensor positions = at::arange(tokens) * 3;
      auto tables = rotary_tables(positions, rotary, 1e4, {}, at::kFloat);
      const Operator run = [&, rotary = rotary](const KernelTable& kernels, const Tensors& in) {
        const at::Tensor cos = tables.first.to(in[0].device()),
                         sin = tables.second.to(in[0].device());
        return Tensors{qk_norm_rope(kernels, in[0], in[1], cos, sin, 1e-6)};
      };
      expect_fused_equals_reference(
          kQkNormRope, run, {values({tokens, heads, width}, 1), values({width}, 2) * 0.3}, dtype);
    }
  }
}

TEST_F(GpuFused, QkNormRopeTakesColumnsOfAProjection) {
  // q is the first half of each head of the projection, the output gate the second.
  for (const c10::ScalarType dtype : kTypes) {
    const KernelTable fused = fused_table(kQkNormRope, dtype);
    const at::Tensor q = values({19, 4, 64}, 1).to(gpu(), dtype),
                     w = values({64}, 2).to(gpu(), dtype);
    auto [cos, sin] = rotary_tables(at::arange(19).to(gpu()), 16, 1e4, {}, at::kFloat);
    const auto run = [&, cos = cos, sin = sin](const at::Tensor& x) {
      return qk_norm_rope(fused, x, w, cos, sin, 1e-6).cpu();
    };
    EXPECT_TRUE(identical(run(with_poisoned_gaps(q, 64)), run(q)));
    EXPECT_TRUE(
        identical(run(with_poisoned_gaps(q.view({19, 256}), 24).view({19, 4, 64})), run(q)));
  }
}

TEST_F(GpuFused, SwigluEqualsReference) {
  const Operator apart = [](const KernelTable& kernels, const Tensors& in) {
    return Tensors{swiglu(kernels, in[0], in[1])};
  };
  const Operator halves = [](const KernelTable& kernels, const Tensors& in) {
    const std::vector<at::Tensor> parts = in[0].chunk(2, 1);
    return Tensors{swiglu(kernels, parts[0], parts[1])};
  };
  for (const c10::ScalarType dtype : kTypes) {
    for (const auto& [tokens, width] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {0, 8}, {1, 1}, {300, 3584}, {33, 1000}, {77, 37}}) {
      SCOPED_TRACE(shape_text({tokens, width}, dtype));
      const at::Tensor gate = values({tokens, width}, 1) * 4, up = values({tokens, width}, 2);
      expect_fused_equals_reference(kSwiglu, apart, {gate, up}, dtype);
      expect_fused_equals_reference(kSwiglu, halves, {at::cat({gate, up}, 1)}, dtype);
    }
  }
}

TEST_F(GpuFused, OutputGateEqualsReference) {
  // The gate is the second half of each head of the projection.
  const Operator run = [](const KernelTable& kernels, const Tensors& in) {
    return Tensors{output_gate(kernels, in[0], in[1].chunk(2, 2)[1])};
  };
  for (const c10::ScalarType dtype : kTypes) {
    for (const auto& [tokens, heads, width] : std::vector<std::array<std::int64_t, 3>>{
             {0, 2, 64}, {1, 1, 1}, {300, 8, 256}, {33, 3, 17}}) {
      SCOPED_TRACE(shape_text({tokens, heads, width}, dtype));
      expect_fused_equals_reference(
          kOutputGate, run,
          {values({tokens, heads, width}, 1), values({tokens, heads, 2 * width}, 2)}, dtype);
    }
  }
}

TEST_F(GpuFused, OutputsMadeAgainInTheBackwardAreTheForwards) {
  using Made = std::function<at::Tensor(const KernelTable&, const Tensors&, OutputAgain)>;
  const Made norm = [](const KernelTable& kernels, const Tensors& in, OutputAgain again) {
    return rms_norm_branch(kernels, in[0], in[1].select(0, 0), 1e-6, std::move(again)).first;
  };
  const Made gated = [](const KernelTable& kernels, const Tensors& in, OutputAgain again) {
    return swiglu(kernels, in[0], in[1], std::move(again));
  };
  const Made gate = [](const KernelTable& kernels, const Tensors& in, OutputAgain again) {
    return output_gate(kernels, in[0].unsqueeze(1), in[1].unsqueeze(1), std::move(again));
  };
  for (const auto& [kernels, make] :
       {std::pair{kRmsNorm, norm}, {kSwiglu, gated}, {kOutputGate, gate}}) {
    for (const c10::ScalarType dtype : kTypes) {
      for (const std::int64_t width : {5, 1024, 2560, 4096}) {
        SCOPED_TRACE(shape_text({33, width}, dtype));
        const KernelTable fused = fused_table(kernels, dtype);
        const Tensors inputs = on_gpu({values({33, width}, 1), values({33, width}, 2)}, dtype);
        at::Tensor again;
        const auto run = [&](const OutputAgain& take) {
          return gradients_of([&](const Tensors& in) { return Tensors{make(fused, in, take)}; },
                              inputs);
        };
        const Tensors actual = run([&](const at::Tensor&y) { again = y; }), expected = run({});
        EXPECT_TRUE(identical(again.cpu(), make(fused, inputs, {}).cpu()));
        for (std::size_t i = 0; i < 2; ++i)
          EXPECT_TRUE(identical(actual[i].cpu(), expected[i].cpu()));
      }
    }
  }
}

TEST_F(GpuFused, GatedRmsNormMadeAgainIsTheForwards) {
  for (const c10::ScalarType dtype : kTypes) {
    for (const std::int64_t width : {17, 64, 128, 256}) {
      SCOPED_TRACE(shape_text({33, 3, width}, dtype));
      const KernelTable fused = fused_table(kGatedRmsNorm, dtype);
      const Tensors inputs =
          on_gpu({values({33, 3, width}, 1), values({33, 3, width}, 2), values({width}, 3)}, dtype);
      at::Tensor again;
      const auto run = [&](const OutputAgain& take) {
        return gradients_of(
            [&](const Tensors& in) {
              return Tensors{gated_rms_norm(fused, in[0], in[1], in[2], 1e-6, take)};
            },
            inputs);
      };
      const Tensors actual = run([&](const at::Tensor&y) { again = y; }), expected = run({});
      EXPECT_TRUE(identical(again.cpu(),
                            gated_rms_norm(fused, inputs[0], inputs[1], inputs[2], 1e-6).cpu()));
      for (std::size_t i = 0; i < 3; ++i)
        EXPECT_TRUE(identical(actual[i].cpu(), expected[i].cpu()));
    }
  }
}

TEST_F(GpuFused, NormOfTwoReadersEqualsReference) {
  const Operator run = [](const KernelTable& kernels, const Tensors& in) {
    const NormBranches branches = rms_norm_branches(kernels, in[0], in[1], 1e-6);
    return Tensors{branches.y, branches.y_2, branches.stream};
  };
  for (const c10::ScalarType dtype : kTypes) {
    for (const std::int64_t width : {3, 1024, 2048, 2560, 8192}) {
      SCOPED_TRACE(shape_text({700, width}, dtype));
      expect_fused_equals_reference(kRmsNorm, run, {values({700, width}, 1), values({width}, 2)},
                                    dtype);
    }
  }
}

// Frozen parameters have no gradient, and the others keep their bits.
TEST_F(GpuFused, FrozenParametersLeaveTheOtherGradientsAsTheyAre) {
  struct Frozen {
    OpRequest kernel;
    Operator run;
    Tensors inputs;
    std::vector<std::size_t> parameters;
  };
  const std::vector<Frozen> cases = {
      {kRmsNorm,
       [](const KernelTable& kernels, const Tensors& in) {
         return Tensors{rms_norm(kernels, in[0], in[1], 1e-6)};
       },
       {values({129, 257}, 1), values({257}, 2)},
       {1}},
      {kGatedRmsNorm,
       [](const KernelTable& kernels, const Tensors& in) {
         return Tensors{gated_rms_norm(kernels, in[0], in[1], in[2], 1e-6)};
       },
       {values({333, 3, 128}, 1), values({333, 3, 128}, 2), values({128}, 3)},
       {2}},
      {kGates,
       [](const KernelTable& kernels, const Tensors& in) {
         const auto [g, beta] = gdn_gates(kernels, in[0], in[1], in[2], in[3]);
         return Tensors{g, beta};
       },
       {values({333, 6}, 1), values({333, 6}, 2), values({6}, 3), values({6}, 4)},
       {2, 3}},
      {kQkNormRope,
       [](const KernelTable& kernels, const Tensors& in) {
         return Tensors{qk_norm_rope(kernels, in[0], in[1], in[2].detach(), in[3].detach(), 1e-6)};
       },
       {values({65, 3, 64}, 1), values({64}, 2), values({65, 8}, 3), values({65, 8}, 4)},
       {1}}};
  for (const auto& [kernel, run, given, parameters] : cases) {
    const KernelTable fused = fused_table(kernel, at::kBFloat16);
    const Tensors inputs = on_gpu(given, at::kBFloat16);
    const Tensors expected =
        gradients_of([&](const Tensors& in) { return run(fused, in); }, inputs);
    const Tensors actual = gradients_of(
        [&](const Tensors& in) {
          Tensors some = in;
          for (const std::size_t i : parameters) some[i] = some[i].detach();
          return run(fused, some);
        },
        inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (actual[i].defined()) EXPECT_TRUE(identical(actual[i].cpu(), expected[i].cpu())) << i;
    }
    EXPECT_TRUE(actual[0].defined());
    for (const std::size_t i : parameters) EXPECT_FALSE(actual[i].defined()) << i;
  }
}

TEST_F(GpuFused, TensorsOfTheCpuAreRefused) {
  const KernelTable fused = fused_table(kRmsNorm, at::kFloat);
  EXPECT_THROW(rms_norm(fused, randn({2, 8}, at::kFloat, 1), randn({8}, at::kFloat, 2), 1e-6),
               c10::Error);
}

}  // namespace
}  // namespace heddle::ops::testing
