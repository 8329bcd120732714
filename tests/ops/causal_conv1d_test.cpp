#include "ops/causal_conv1d/causal_conv1d.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "ops/builtin.h"
#include "ops/causal_conv1d/conv_decode.h"
#include "ops/operator_support.h"

namespace heddle::ops {
namespace {

using testing::any;
using testing::close;
using testing::gradients_match;
using testing::gradients_of;
using testing::identical;
using testing::Kernel;
using testing::randn;

KernelTable table(const Kernel& kernel) {
  return testing::table_of(any<CausalConv1d>(), kernel.name, kernel.dtype);
}

struct Problem {
  Tensors inputs;  // x, weight and perhaps initial_state
  Sequences sequences;
};

Problem make(const std::vector<std::int32_t>& lengths, std::int64_t C, std::int64_t W,
             c10::ScalarType dtype, bool initial = true) {
  std::vector<std::int32_t> cu{0};
  for (const std::int32_t n : lengths) cu.push_back(cu.back() + n);
  const std::int64_t S = static_cast<std::int64_t>(lengths.size());
  Problem p{{randn({cu.back(), C}, dtype, 1), randn({C, W}, dtype, 2)},
            Sequences::from_host(cu, testing::device())};
  if (initial) p.inputs.push_back(randn({S, C, W - 1}, dtype, 3));
  return p;
}

Tensors call(const Problem& p, const KernelTable& kernels, const Tensors& x) {
  const CausalConv1dResult out =
      causal_conv1d(kernels, {x[0], x[1], x.size() > 2 ? x[2] : at::Tensor(), p.sequences, true});
  return {out.y, out.final_state};
}

Tensors run(const Problem& p, const Kernel& kernel, const Tensors& inputs) {
  const KernelTable kernels = table(kernel);
  Tensors result;
  const Tensors gradients = gradients_of(
      [&](const Tensors& x) {
        const Tensors out = call(p, kernels, x);
        result = {out[0].detach(), out[1].detach()};
        return out;
      },
      inputs);
  result.insert(result.end(), gradients.begin(), gradients.end());
  return result;
}

Tensors in_double(const Tensors& inputs) {
  Tensors wide;
  for (const at::Tensor& x : inputs) wide.push_back(x.to(at::kDouble));
  return wide;
}

class CausalConv1dKernels : public ::testing::TestWithParam<Kernel> {
 protected:
  void expect_close(const Problem& p) const {
    const Tensors found = run(p, GetParam(), p.inputs);
    const Tensors expected = run(p, {"reference", at::kDouble}, in_double(p.inputs));
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(close(found[i], expected[i], testing::tolerance_of(GetParam().dtype)))
          << "result " << i;
    }
  }
};

TEST_P(CausalConv1dKernels, OddSizes) {
  for (const std::int64_t C : {1, 7, 16, 65, 513, 1040}) {
    expect_close(make({0, 1, 2, 0, 3, 63, 64, 65, 129, 0}, C, 4, GetParam().dtype));
    expect_close(make({5, 0, 66}, C, 4, GetParam().dtype, false));
  }
}

TEST_P(CausalConv1dKernels, EveryNumberOfTaps) {
  for (std::int64_t W = 2; W <= 8; ++W) {
    expect_close(make({1, 0, 5, 70, 6}, 33, W, GetParam().dtype));
  }
}

TEST_P(CausalConv1dKernels, NoTokens) { expect_close(make({0, 0}, 20, 4, GetParam().dtype)); }

TEST_P(CausalConv1dKernels, LargeInputsSaturate) {
  Problem p = make({70}, 40, 4, GetParam().dtype);
  p.inputs[0] = p.inputs[0] * 200;
  expect_close(p);
}

TEST_P(CausalConv1dKernels, RowStrideAndPoisonedGaps) {
  const Problem p = make({30, 70}, 48, 4, GetParam().dtype);
  const Tensors expected = run(p, GetParam(), p.inputs);
  const Tensors found =
      run(p, GetParam(), {testing::with_poisoned_gaps(p.inputs[0]), p.inputs[1], p.inputs[2]});
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(identical(found[i], expected[i]));
}

TEST_P(CausalConv1dKernels, NeighboursDoNotLeak) {
  const Problem p = make({30, 70, 2}, 24, 4, GetParam().dtype);
  Tensors poisoned;
  for (const at::Tensor& x : p.inputs) poisoned.push_back(x.clone());
  const double nan = std::numeric_limits<double>::quiet_NaN();
  poisoned[0].narrow(0, 0, 30).fill_(nan);
  poisoned[0].narrow(0, 100, 2).fill_(nan);
  poisoned[2].select(0, 0).fill_(nan);
  poisoned[2].select(0, 2).fill_(nan);
  const Tensors expected = run(p, GetParam(), p.inputs), found = run(p, GetParam(), poisoned);
  EXPECT_TRUE(identical(found[0].narrow(0, 30, 70), expected[0].narrow(0, 30, 70)));
  EXPECT_TRUE(identical(found[1].select(0, 1), expected[1].select(0, 1)));
  EXPECT_TRUE(identical(found[2].narrow(0, 30, 70), expected[2].narrow(0, 30, 70)));
  EXPECT_TRUE(identical(found[4].select(0, 1), expected[4].select(0, 1)));
}

TEST_P(CausalConv1dKernels, DecodingEqualsTheSequence) {
  const Problem p = make({6, 6}, 37, 4, GetParam().dtype);
  const KernelTable kernels = table(GetParam());
  const Tensors expected = call(p, kernels, p.inputs);
  at::Tensor states =
      at::full({3, 37, 3}, std::numeric_limits<double>::quiet_NaN(), p.inputs[0].options());
  states.select(0, 2).copy_(p.inputs[2].select(0, 0));
  states.select(0, 0).copy_(p.inputs[2].select(0, 1));
  const KernelTable decoding = testing::table_of(
      any<ConvDecode>(), GetParam().name == "reference" ? GetParam().name : testing::kOwn,
      GetParam().dtype);
  const CacheRows rows = CacheRows::from_host({2, 0}, {0, 0}, testing::device());
  for (int t = 0; t < 6; ++t) {
    const at::Tensor x = at::cat({p.inputs[0].narrow(0, t, 1), p.inputs[0].narrow(0, 6 + t, 1)});
    const at::Tensor y = conv_decode(decoding, x, p.inputs[1], states, rows);
    for (int s = 0; s < 2; ++s) {
      EXPECT_TRUE(close(y.select(0, s), expected[0].select(0, 6 * s + t),
                        testing::tolerance_of(GetParam().dtype)));
    }
  }
  EXPECT_TRUE(identical(states.select(0, 2), expected[1].select(0, 0)));
  EXPECT_TRUE(identical(states.select(0, 0), expected[1].select(0, 1)));
}

TEST_P(CausalConv1dKernels, SameBitsEveryTime) {
  const Problem p = make({100, 300}, 600, 4, GetParam().dtype);
  const Tensors first = run(p, GetParam(), p.inputs);
  const Tensors again = run(p, GetParam(), p.inputs);
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(identical(again[i], first[i]));
}

std::vector<Kernel> kernels_under_test() {
  std::vector<Kernel> kernels;
  for (const std::string name : {testing::kOwn, "reference"}) {
    for (const auto dtype : testing::kernel_dtypes()) kernels.push_back({name, dtype});
  }
  return kernels;
}

INSTANTIATE_TEST_SUITE_P(All, CausalConv1dKernels, ::testing::ValuesIn(kernels_under_test()),
                         heddle::testing::ParameterName());

TEST(CausalConv1d, GradientsMatchFiniteDifferences) {
  for (const std::string name : {testing::kOwn, "reference"}) {
    const Problem p = make({0, 1, 2, 67, 5}, 3, 4, at::kDouble);
    const KernelTable kernels = table({name, at::kDouble});
    EXPECT_TRUE(gradients_match([&](const Tensors& x) { return call(p, kernels, x); }, p.inputs))
        << name;
  }
}

TEST(CausalConv1d, RefusesWhatDoesNotFit) {
  const Problem p = make({5}, 8, 4, at::kFloat);
  const KernelTable kernels = table({"reference", at::kFloat});
  EXPECT_THROW(call(p, kernels, {p.inputs[0].narrow(1, 0, 7), p.inputs[1]}), c10::Error);
  EXPECT_THROW(call(p, kernels, {p.inputs[0], randn({8, 9}, at::kFloat, 1)}), c10::Error);
  EXPECT_THROW(call(p, kernels, {p.inputs[0], p.inputs[1], randn({1, 8, 2}, at::kFloat, 1)}),
               c10::Error);
  Problem shorter = p;
  shorter.sequences = Sequences::from_host({0, 4}, testing::device());
  EXPECT_THROW(call(shorter, kernels, p.inputs), c10::Error);
}

}  // namespace
}  // namespace heddle::ops
