#include "ops/gated_delta_net/gated_delta_net.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/gated_delta_net/gated_delta_rule_decode.h"
#include "ops/gated_delta_net/kernels.h"
#include "ops/gated_delta_rule_support.h"

namespace heddle::ops {
namespace {

using testing::any;
using testing::call;
using testing::Case;
using testing::device;
using testing::Gate;
using testing::gradients_match;
using testing::gradients_of;
using testing::identical;
using testing::in_double;
using testing::Kernel;
using testing::Keys;
using testing::kOwn;
using testing::make;
using testing::names;
using testing::Problem;
using testing::randn;
using testing::rms_error;
using testing::run_exactly;

KernelTable table(const std::string& kernel, c10::ScalarType dtype) {
  return testing::table_of(any<GatedDeltaRule>(), kernel, dtype);
}

Tensors run(const Problem& p, const std::string& kernel, c10::ScalarType dtype) {
  return testing::run(p, table(kernel, dtype));
}

std::vector<Kernel> kernels_under_test() {
  std::vector<Kernel> kernels;
  for (const char* name : {kOwn, "reference"}) {
    for (const auto dtype : testing::kernel_dtypes()) kernels.push_back({name, dtype});
  }
  return kernels;
}

/// Relative RMS errors: fp32 sums of 64 to 128 terms; bf16 is the rounding of outputs alone.
double tolerance_of(c10::ScalarType dtype) {
  if (dtype == at::kDouble) return 1e-12;
  return dtype == at::kFloat ? 2e-6 : 4e-3;
}

class GatedDeltaRuleKernels : public ::testing::TestWithParam<Kernel> {
 protected:
  /// Every output and gradient against the recurrence in double from the same numbers.
  void expect_close(const Case& c, double slack = 1) const {
    const Kernel& kernel = GetParam();
    const Problem problem = make(c, kernel.dtype);
    const Tensors found = run(problem, kernel.name, kernel.dtype);
    const Tensors expected = run_exactly(problem);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      ASSERT_TRUE(found[i].defined()) << names()[i];
      ASSERT_EQ(found[i].sizes(), expected[i].sizes()) << names()[i];
      if (found[i].numel() == 0) continue;
      // dg is a difference of large sums: any chunked form loses one to two digits.
      const bool cancels = names()[i] == "dg" && kernel.dtype == at::kFloat;
      EXPECT_LE(rms_error(found[i], expected[i]),
                slack * tolerance_of(kernel.dtype) * (cancels ? 50 : 1))
          << names()[i] << ", " << c.text();
    }
  }
};

TEST_P(GatedDeltaRuleKernels, EveryLength) {
  for (const std::int32_t n : {1, 2, 15, 16, 17, 29, 63, 64, 65, 128, 129, 200}) {
    Case c;
    c.lengths = {n};
    expect_close(c);
    c.initial = false;
    expect_close(c);
  }
}

TEST_P(GatedDeltaRuleKernels, PackedWithEmptySequences) {
  Case c;
  c.Hk = 2;
  c.lengths = {0, 65, 1, 0, 129, 29, 0, 64};
  expect_close(c);
}

TEST_P(GatedDeltaRuleKernels, NoTokensAtAll) {
  Case c;
  c.lengths = {0, 0};
  const Problem p = make(c, GetParam().dtype);
  const Tensors found = run(p, GetParam().name, GetParam().dtype);
  EXPECT_EQ(found[0].size(0), 0);
  EXPECT_TRUE(identical(found[1], p.inputs[5]));
}

TEST_P(GatedDeltaRuleKernels, HeadGroups) {
  for (const std::int64_t group : {1, 2, 3, 4}) {
    Case c;
    c.lengths = {70, 13};
    c.Hk = 3;
    c.group = group;
    expect_close(c);
  }
}

TEST_P(GatedDeltaRuleKernels, HeadSizes) {
  const std::vector<std::pair<std::int64_t, std::int64_t>> sizes = {
      {32, 16}, {16, 48}, {64, 64}, {128, 128}, {64, 128}, {96, 80}, {256, 32}};
  for (const auto& [K, V] : sizes) {
    Case c;
    c.lengths = {67, 9};
    c.K = K;
    c.V = V;
    expect_close(c);
  }
}

TEST_P(GatedDeltaRuleKernels, GateKinds) {
  for (const Gate gate : {Gate::kLogSigmoid, Gate::kInitialisation, Gate::kZero, Gate::kMixed}) {
    Case c;
    c.lengths = {150, 33};
    c.Hk = 2;
    c.K = c.V = 32;
    c.gate = gate;
    expect_close(c);
  }
}

TEST_P(GatedDeltaRuleKernels, KeyKinds) {
  for (const Keys keys : {Keys::kRandom, Keys::kCorrelated, Keys::kIdentical, Keys::kAlternating}) {
    Case c;
    c.lengths = {150, 64};
    c.K = c.V = 32;
    c.keys = keys;
    c.beta_shift = 2;
    for (const Gate gate : {Gate::kLogSigmoid, Gate::kZero}) {
      c.gate = gate;
      expect_close(c, 4);
    }
  }
}

TEST_P(GatedDeltaRuleKernels, BetaNearZeroAndOne) {
  for (const double shift : {-60.0, -8.0, 8.0, 30.0}) {
    Case c;
    c.lengths = {80};
    c.beta_shift = shift;
    expect_close(c, 2);
  }
  Case c;
  c.lengths = {80, 7};
  c.beta_edges = true;
  for (const Gate gate : {Gate::kLogSigmoid, Gate::kZero, Gate::kInitialisation}) {
    c.gate = gate;
    expect_close(c, 2);
  }
}

TEST_P(GatedDeltaRuleKernels, BetaZeroStillHasItsGradient) {
  Case c;
  c.lengths = {50};
  Problem p = make(c, GetParam().dtype);
  p.inputs[4].zero_();
  const Tensors found = run(p, GetParam().name, GetParam().dtype);
  const Tensors expected = run_exactly(p);
  EXPECT_LE(rms_error(found[6], expected[6]), tolerance_of(GetParam().dtype));
}

TEST_P(GatedDeltaRuleKernels, RawKeysAndGivenScale) {
  Case c;
  c.lengths = {40, 30};
  c.normalize = false;
  c.scale = 0.37;
  Problem p = make(c, GetParam().dtype);
  p.inputs[1] = p.inputs[1] * 0.125;  // a power of two: exact in every dtype
  const Tensors found = run(p, GetParam().name, GetParam().dtype);
  const Tensors expected = run_exactly(p);
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_LE(rms_error(found[i], expected[i]), 15 * tolerance_of(GetParam().dtype)) << names()[i];
  }
}

TEST_P(GatedDeltaRuleKernels, OnlyOneOutputIsUsed) {
  Case c;
  c.lengths = {70, 0, 20};
  const Problem p = make(c, GetParam().dtype);
  for (const std::size_t used : {0, 1}) {
    const auto only = [&](const KernelTable& kernels) {
      return [&, kernels](const Tensors& x) -> Tensors { return {call(p, kernels, x)[used]}; };
    };
    const Tensors found = gradients_of(only(table(GetParam().name, GetParam().dtype)), p.inputs);
    const Tensors expected =
        gradients_of(only(table("reference", at::kDouble)), in_double(p).inputs);
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_LE(rms_error(found[i], expected[i]), 15 * tolerance_of(GetParam().dtype))
          << names()[i + 2] << " through output " << used;
    }
  }
}

TEST_P(GatedDeltaRuleKernels, StateCarriesAcrossACut) {
  Case c;
  c.lengths = {150};
  const Problem whole = make(c, GetParam().dtype);
  const KernelTable kernels = table(GetParam().name, GetParam().dtype);
  const Tensors expected = call(whole, kernels, whole.inputs);
  at::Tensor state = whole.inputs[5];
  Tensors pieces;
  for (const auto& [from, to] : {std::pair{0, 37}, {37, 38}, {38, 150}}) {
    Problem part = whole;
    part.sequences = Sequences::from_host({0, to - from}, device());
    Tensors inputs;
    for (int i = 0; i < 5; ++i) inputs.push_back(whole.inputs[i].narrow(0, from, to - from));
    inputs.push_back(state);
    const Tensors out = call(part, kernels, inputs);
    pieces.push_back(out[0]);
    state = out[1];
  }
  EXPECT_LE(rms_error(at::cat(pieces), expected[0]), tolerance_of(GetParam().dtype));
  EXPECT_LE(rms_error(state, expected[1]), tolerance_of(GetParam().dtype));
}

TEST_P(GatedDeltaRuleKernels, NeighboursDoNotLeak) {
  Case c;
  c.lengths = {33, 65, 17};
  c.Hk = 2;
  const Problem clean = make(c, GetParam().dtype);
  Problem poisoned = clean;
  for (at::Tensor& x : poisoned.inputs) {
    x = x.clone();
    const bool state = x.dim() == 4;
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (const std::int64_t s : {0, 2}) {
      const std::int64_t from = state ? s : (s == 0 ? 0 : 98), count = state ? 1 : s == 0 ? 33 : 17;
      x.narrow(0, from, count).fill_(nan);
    }
  }
  const Tensors expected = run(clean, GetParam().name, GetParam().dtype);
  const Tensors found = run(poisoned, GetParam().name, GetParam().dtype);
  for (std::size_t i = 0; i < found.size(); ++i) {
    const bool state = found[i].dim() == 4;
    const std::int64_t from = state ? 1 : 33, count = state ? 1 : 65;
    EXPECT_TRUE(identical(found[i].narrow(0, from, count), expected[i].narrow(0, from, count)))
        << names()[i];
  }
}

TEST_P(GatedDeltaRuleKernels, ColumnsOfOneProjection) {
  Case c;
  c.lengths = {45, 30};
  c.Hk = 2;
  const Problem p = make(c, GetParam().dtype);
  const KernelTable kernels = table(GetParam().name, GetParam().dtype);
  const at::Tensor qkv =
      at::cat({p.inputs[0].flatten(1), p.inputs[1].flatten(1), p.inputs[2].flatten(1)}, 1);
  const Tensors gates{p.inputs[3], p.inputs[4], p.inputs[5]};
  const auto joined = [&](const Tensors& x) {
    const auto [q, k, v] = split_qkv(x[0], c.Hk, c.K, c.Hk * c.group, c.V);
    return call(p, kernels, {q, k, v, x[1], x[2], x[3]});
  };
  const Tensors expected =
      gradients_of([&](const Tensors& x) { return call(p, kernels, x); }, p.inputs);
  // A row stride beyond the columns, with NaN between the rows.
  const Tensors found =
      gradients_of(joined, {testing::with_poisoned_gaps(qkv), gates[0], gates[1], gates[2]});
  EXPECT_TRUE(identical(
      found[0],
      at::cat({expected[0].flatten(1), expected[1].flatten(1), expected[2].flatten(1)}, 1)));
  for (int i = 1; i < 4; ++i) EXPECT_TRUE(identical(found[i], expected[i + 2]));
}

TEST_P(GatedDeltaRuleKernels, SameBitsEveryTime) {
  Case c;
  c.lengths = {100, 3, 260};
  c.Hk = 2;
  c.K = c.V = 64;
  const Problem p = make(c, GetParam().dtype);
  const Tensors first = run(p, GetParam().name, GetParam().dtype);
  for (int again = 0; again < 3; ++again) {
    const Tensors next = run(p, GetParam().name, GetParam().dtype);
    for (std::size_t i = 0; i < first.size(); ++i) {
      EXPECT_TRUE(identical(next[i], first[i])) << names()[i];
    }
  }
}

TEST_P(GatedDeltaRuleKernels, DecodingEqualsTheSequence) {
  Case c;
  c.lengths = {7, 7, 7};
  c.Hk = 2;
  c.group = 3;
  c.K = 32;
  const Problem p = make(c, GetParam().dtype);
  const KernelTable kernels = table(GetParam().name, GetParam().dtype);
  const Tensors expected = call(p, kernels, p.inputs);
  const std::vector<std::int64_t> slots{4, 0, 2};
  const CacheRows cache_rows = CacheRows::from_host(slots, {0, 0, 0}, device());
  at::Tensor states =
      at::full({5, 6, c.K, c.V}, std::numeric_limits<double>::quiet_NaN(), p.inputs[5].options());
  for (int s = 0; s < 3; ++s) states.select(0, slots[s]).copy_(p.inputs[5].select(0, s));
  at::Tensor referred = states.clone();
  const auto decode_table = [&](const char* name) {
    return testing::table_of(any<GatedDeltaRuleDecode>(), name, GetParam().dtype);
  };
  const KernelTable reference = decode_table("reference"), own = decode_table(kOwn);
  for (int t = 0; t < 7; ++t) {
    const auto rows = [&](int i) {
      return at::cat({p.inputs[i].narrow(0, t, 1), p.inputs[i].narrow(0, 7 + t, 1),
                      p.inputs[i].narrow(0, 14 + t, 1)});
    };
    for (const KernelTable* decoding : {&reference, &own}) {
      at::Tensor& some = decoding == &own ? states : referred;
      const at::Tensor o = gated_delta_rule_decode(*decoding,
                                                   {rows(0), rows(1), rows(2), rows(3), rows(4),
                                                    some, p.options.scale, p.options.normalize_qk},
                                                   cache_rows);
      for (int s = 0; s < 3; ++s) {
        EXPECT_LE(rms_error(o.select(0, s), expected[0].select(0, 7 * s + t)),
                  2 * tolerance_of(GetParam().dtype));
      }
    }
  }
  for (int s = 0; s < 3; ++s) {
    for (const at::Tensor& some : {states, referred}) {
      EXPECT_LE(rms_error(some.select(0, slots[s]), expected[1].select(0, s)),
                tolerance_of(GetParam().dtype));
    }
  }
  EXPECT_TRUE(states.select(0, 1).isnan().all().item().toBool());
  EXPECT_TRUE(states.select(0, 3).isnan().all().item().toBool());
}

INSTANTIATE_TEST_SUITE_P(All, GatedDeltaRuleKernels, ::testing::ValuesIn(kernels_under_test()),
                         heddle::testing::ParameterName());

// The other kernels are compared with this one.
TEST(GatedDeltaRule, GradientsMatchFiniteDifferences) {
  const KernelTable kernels = table("cpu.sequential", at::kDouble);
  const auto expect_match = [&](const Case& c) {
    const Problem p = make(c, at::kDouble);
    EXPECT_TRUE(gradients_match([&](const Tensors& x) { return call(p, kernels, x); }, p.inputs))
        << c.text();
  };
  for (const std::int32_t n : {1, 29, 63, 64, 65, 129}) {
    Case c;
    c.lengths = {n, 0, 3};
    c.K = 4;
    c.V = 3;
    expect_match(c);
  }
  for (const std::int64_t group : {1, 3, 4}) {
    Case c;
    c.lengths = {5, 0, 9};
    c.Hk = 2;
    c.group = group;
    c.K = 4;
    c.V = 3;
    c.keys = Keys::kAlternating;
    c.gate = Gate::kMixed;
    expect_match(c);
  }
}

// fp32 errors do not grow with the length, even where nothing is forgotten.
TEST(SlowGatedDeltaRule, LongSequencesStayAccurate) {
  for (const Gate gate : {Gate::kLogSigmoid, Gate::kInitialisation, Gate::kZero, Gate::kMixed}) {
    for (const Keys keys : {Keys::kRandom, Keys::kCorrelated}) {
      Case c;
      c.lengths = {8192};
      c.group = 1;
      c.K = c.V = 64;
      c.gate = gate;
      c.keys = keys;
      const Problem problem = make(c, at::kFloat);
      const Tensors expected = run_exactly(problem);
      for (const std::string kernel : {kOwn, "reference"}) {
        const Tensors found = run(problem, kernel, at::kFloat);
        for (std::size_t i = 0; i < found.size(); ++i) {
          const double error = rms_error(found[i], expected[i]);
          RecordProperty(kernel + "." + names()[i], std::to_string(error));
          EXPECT_LE(error, names()[i] == "dg" ? 3e-4 : 5e-6)
              << kernel << " " << names()[i] << ", " << c.text();
        }
      }
    }
  }
}

TEST(GatedDeltaRule, TriangularInverse) {
  for (const Keys keys : {Keys::kRandom, Keys::kCorrelated, Keys::kIdentical, Keys::kAlternating}) {
    Case c;
    c.lengths = {64};
    c.K = 128;
    c.keys = keys;
    const at::Tensor k = make(c, at::kFloat).inputs[1].select(1, 0);
    const at::Tensor unit = k / (k * k).sum({-1}, true).sqrt();
    const double beta = keys == Keys::kCorrelated ? 0.9 : 1;
    const at::Tensor lower = beta * at::matmul(unit, unit.t()).tril(-1);
    const at::Tensor inverse = gated_delta_rule_reference::unit_lower_inverse(lower.unsqueeze(0));
    const at::Tensor exact =
        gated_delta_rule_reference::unit_lower_inverse(lower.to(at::kDouble).unsqueeze(0));
    const at::Tensor product =
        at::matmul(at::eye(64, exact.options()) + lower.to(at::kDouble).unsqueeze(0), exact);
    EXPECT_LE((product - at::eye(64, exact.options())).abs().max().item().toDouble(), 1e-12);
    EXPECT_LE((inverse.to(at::kDouble) - exact).abs().max().item().toDouble(), 2e-6)
        << "keys " << static_cast<int>(keys);
  }
}

TEST(GatedDeltaRule, OddHeadDimsTakeTheReference) {
  for (const auto& [dim, kernel] : {std::pair{24, "reference"}, {48, "cpu.chunk"}}) {
    const KernelTable chosen =
        KernelTable::choose(builtin_registry(), {}, at::kFloat,
                            {OpRequest::of<GatedDeltaRule>({.head_k_dim = 64, .head_v_dim = dim})});
    EXPECT_EQ(chosen.choices()[0].kernel, kernel);
  }
}

TEST(GatedDeltaRule, RefusesWhatDoesNotFit) {
  Case c;
  c.lengths = {5};
  const Problem p = make(c, at::kFloat);
  const KernelTable kernels = table("reference", at::kFloat);
  const auto with = [&](std::size_t i, const at::Tensor& x) {
    Tensors inputs = p.inputs;
    inputs[i] = x;
    return inputs;
  };
  EXPECT_THROW(call(p, kernels, with(1, p.inputs[1].narrow(2, 0, 8))), c10::Error);
  EXPECT_THROW(call(p, kernels, with(2, p.inputs[2].to(at::kDouble))), c10::Error);
  EXPECT_THROW(call(p, kernels, with(3, p.inputs[3].to(at::kBFloat16))), c10::Error);
  EXPECT_THROW(call(p, kernels, with(5, p.inputs[5].narrow(1, 0, 1))), c10::Error);
  Problem shorter = p;
  shorter.sequences = Sequences::from_host({0, 4}, device());
  EXPECT_THROW(call(shorter, kernels, p.inputs), c10::Error);
}

}  // namespace
}  // namespace heddle::ops
