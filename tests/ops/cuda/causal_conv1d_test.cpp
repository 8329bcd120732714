#include "ops/causal_conv1d/causal_conv1d.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>

#include <limits>

#include "ops/builtin.h"
#include "ops/cuda/fused_support.h"

namespace heddle::ops::testing {
namespace {

const OpRequest kConv = any<CausalConv1d>();

/// Tiles of the kernels begin, end and lie inside sequences; some are empty or shorter than the
/// kernel is wide.
const std::vector<std::int32_t> kRagged = {0, 0, 1, 3, 70, 70, 200, 203, 520, 520};

Operator convolution(const std::vector<std::int32_t>& ends) {
  return [ends](const KernelTable& kernels, const Tensors& in) {
    CausalConv1d::Inputs inputs;
    inputs.x = in[0];
    inputs.weight = in[1];
    inputs.sequences = Sequences::from_host(ends, in[0].device());
    if (in.size() > 2) inputs.initial_state = in[2];
    inputs.want_final_state = in.size() > 2;
    const CausalConv1dResult result = causal_conv1d(kernels, inputs);
    return in.size() > 2 ? Tensors{result.y, result.final_state} : Tensors{result.y};
  };
}

TEST_F(GpuFused, CausalConv1dEqualsReference) {
  const std::int64_t T = kRagged.back(), S = static_cast<std::int64_t>(kRagged.size()) - 1;
  for (const c10::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    for (const std::int64_t channels : {1, 5, 136, 1100}) {
      for (const std::int64_t width : {2, 3, 4, 8}) {
        SCOPED_TRACE(std::to_string(channels) + " x " + std::to_string(width) + " " +
                     c10::toString(dtype));
        const Tensors in = {randn({T, channels}, at::kDouble, 1),
                            randn({channels, width}, at::kDouble, 2) * 0.5,
                            randn({S, channels, width - 1}, at::kDouble, 3)};
        expect_fused_equals_reference(kConv, convolution(kRagged), in, dtype);
        expect_fused_equals_reference(kConv, convolution(kRagged), {in[0], in[1]}, dtype);
      }
    }
  }
}

TEST_F(GpuFused, CausalConv1dWithFrozenTapsHasTheSameInputGradients) {
  const std::int64_t T = kRagged.back();
  for (const c10::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    for (const std::int64_t channels : {5, 136}) {
      const KernelTable fused = fused_table(kConv, dtype);
      const Tensors in = on_gpu(
          {randn({T, channels}, at::kDouble, 1), randn({channels, 4}, at::kDouble, 2)}, dtype);
      const auto run = [&](bool is_frozen) {
        return gradients_of(
            [&](const Tensors& x) {
              return convolution(kRagged)(fused, {x[0], is_frozen ? x[1].detach() : x[1]});
            },
            in);
      };
      const Tensors frozen = run(true), trained = run(false);
      EXPECT_TRUE(identical(frozen[0].cpu(), trained[0].cpu())) << channels;
      EXPECT_FALSE(frozen[1].defined());
    }
  }
}

TEST_F(GpuFused, CausalConv1dTakesOneTokenAndNone) {
  for (const std::vector<std::int32_t>& ends : std::vector<std::vector<std::int32_t>>{
           {0, 1}, {0, 0}, {0, 64}, {0, 128}, {0, 129}, {0, 2, 4, 6, 8}}) {
    const std::int64_t S = static_cast<std::int64_t>(ends.size()) - 1;
    expect_fused_equals_reference(
        kConv, convolution(ends),
        {randn({ends.back(), 16}, at::kDouble, 1), randn({16, 4}, at::kDouble, 2),
         randn({S, 16, 3}, at::kDouble, 3)},
        at::kFloat);
  }
}

TEST_F(GpuFused, CausalConv1dKeepsNeighboursAndGapsOut) {
  const std::vector<std::int32_t> ends = {0, 100, 230, 300};
  for (const c10::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    const KernelTable fused = fused_table(kConv, dtype);
    const at::Tensor x = randn({300, 64}, dtype, 1).to(gpu()),
                     w = randn({64, 4}, dtype, 2).to(gpu()),
                     dy = randn({300, 64}, dtype, 3).to(gpu());
    at::Tensor poisoned = x.clone(), dy_poisoned = dy.clone();
    poisoned.narrow(0, 100, 130).fill_(std::numeric_limits<double>::quiet_NaN());
    dy_poisoned.narrow(0, 100, 130).fill_(std::numeric_limits<double>::quiet_NaN());
    const auto run = [&](const at::Tensor& input, const at::Tensor& grad) {
      CausalConv1d::Inputs in;
      in.x = input.detach();
      in.x.requires_grad_();
      in.weight = w;
      in.sequences = Sequences::from_host(ends, gpu());
      const at::Tensor y = causal_conv1d(fused, in).y;
      run_backward({y}, {grad});
      return Tensors{y.detach(), in.x.grad()};
    };
    const Tensors clean = run(x, dy), dirty = run(poisoned, dy_poisoned),
                  strided = run(with_poisoned_gaps(x, 16), with_poisoned_gaps(dy, 8));
    for (std::size_t i = 0; i < clean.size(); ++i) {
      for (const auto& [begin, length] : {std::pair{0, 100}, {230, 70}}) {
        EXPECT_TRUE(identical(dirty[i].narrow(0, begin, length).cpu(),
                              clean[i].narrow(0, begin, length).cpu()))
            << i;
      }
      EXPECT_TRUE(identical(strided[i].cpu(), clean[i].cpu())) << i;
    }
  }
}

}  // namespace
}  // namespace heddle::ops::testing
