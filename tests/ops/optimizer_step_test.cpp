#include "ops/optimizer_step/optimizer_step.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "ops/builtin.h"
#include "ops/operator_support.h"
#include "ops/optimizer_step/eight_bit.h"
#include "ops/optimizer_step/eight_bit_state.h"
#include "ops/optimizer_step/rounding.h"

namespace heddle::ops::testing {
namespace {

KernelTable table(const std::string& name, c10::ScalarType dtype) {
  return table_of(any<AdamwStep>(), name, dtype);
}

const std::vector<std::int64_t> kSizes = {1, 0, 5, 64, 1023, 4097, 70001};

struct Model {
  std::vector<AdamwTensor> tensors;
};

Model make(c10::ScalarType dtype) {
  Model model;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    AdamwTensor t;
    const auto state = dtype == at::kDouble ? at::kDouble : at::kFloat;
    t.parameter = randn({kSizes[i]}, state, 100 + i);
    if (dtype == at::kBFloat16) {
      t.master = t.parameter;
      t.parameter = t.master.to(at::kBFloat16);
    }
    t.exp_avg = at::zeros({kSizes[i]}, t.parameter.options().dtype(state));
    t.exp_avg_sq = at::zeros({kSizes[i]}, t.parameter.options().dtype(state));
    t.weight_decay = i % 2 == 0 ? 0.1 : 0;
    model.tensors.push_back(t);
  }
  return model;
}

void steps(const KernelTable& kernels, Model& model, c10::ScalarType gradient_dtype, int count,
           double multiplier = 1) {
  AdamwOptions options;
  options.lr = 1e-3;
  options.beta2 = 0.95;
  options.gradient_multiplier = multiplier;
  for (int step = 1; step <= count; ++step) {
    options.step = step;
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      model.tensors[i].gradient = randn({kSizes[i]}, gradient_dtype, 1000 * step + i);
    }
    adamw_step(kernels, model.tensors, options);
  }
}

/// The published algorithm, one number at a time in fp64.
std::vector<double> oracle(const at::Tensor& start, const std::vector<at::Tensor>& gradients,
                           double wd) {
  std::vector<double> p, m(static_cast<std::size_t>(start.numel())), v(m);
  const at::Tensor s = start.cpu().to(at::kDouble);
  for (std::int64_t j = 0; j < start.numel(); ++j) p.push_back(s[j].item().toDouble());
  for (std::size_t t = 1; t <= gradients.size(); ++t) {
    const at::Tensor gradient = gradients[t - 1].cpu().to(at::kDouble).contiguous();
    for (std::size_t j = 0; j < p.size(); ++j) {
      const double g = gradient.const_data_ptr<double>()[j];
      p[j] *= 1 - 1e-3 * wd;
      m[j] = 0.9 * m[j] + 0.1 * g;
      v[j] = 0.95 * v[j] + 0.05 * g * g;
      const double m_hat = m[j] / (1 - std::pow(0.9, double(t)));
      p[j] -= 1e-3 * m_hat / (std::sqrt(v[j] / (1 - std::pow(0.95, double(t)))) + 1e-8);
    }
  }
  return p;
}

TEST(Adamw, FollowsThePublishedAlgorithmOverTwentySteps) {
  for (const char* name : {"reference", kOwn}) {
    for (const c10::ScalarType dtype : {at::kFloat, at::kDouble}) {
      Model model = make(dtype);
      const at::Tensor start = model.tensors[4].parameter.clone();
      steps(table(name, dtype), model, dtype, 20);
      std::vector<at::Tensor> gradients;
      for (int step = 1; step <= 20; ++step) {
        gradients.push_back(randn({kSizes[4]}, dtype, 1000 * step + 4));
      }
      const std::vector<double> expected = oracle(start, gradients, 0.1);
      const at::Tensor p = model.tensors[4].parameter.cpu().to(at::kDouble);
      for (std::size_t j = 0; j < expected.size(); ++j) {
        // fp32 rounds each of the twenty parameter updates.
        const double bound = dtype == at::kDouble ? 1e-13 : 1e-6;
        ASSERT_NEAR(p[static_cast<std::int64_t>(j)].item().toDouble(), expected[j],
                    bound * std::max(1.0, std::abs(expected[j])));
      }
    }
  }
}

TEST(Adamw, KernelEqualsReference) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    for (const c10::ScalarType gradient : {at::kFloat, at::kBFloat16}) {
      Model a = make(dtype), b = make(dtype);
      steps(table(kOwn, dtype), a, gradient, 5, 0.7);
      steps(table("reference", dtype), b, gradient, 5, 0.7);
      for (std::size_t i = 0; i < kSizes.size(); ++i) {
        const AdamwTensor &x = a.tensors[i], &y = b.tensors[i];
        const double tolerance = dtype == at::kDouble ? 1e-12 : 1e-6;
        EXPECT_TRUE(close(x.exp_avg, y.exp_avg, tolerance));
        EXPECT_TRUE(close(x.exp_avg_sq, y.exp_avg_sq, tolerance));
        EXPECT_TRUE(close(x.master.defined() ? x.master : x.parameter,
                          y.master.defined() ? y.master : y.parameter, tolerance));
        if (x.master.defined()) {
          EXPECT_TRUE(identical(x.parameter, x.master.to(at::kBFloat16)));
        }
      }
    }
  }
}

TEST(Adamw, GroupsStepWithTheirOwnNumbers) {
  std::vector<AdamwGroup> groups;
  std::vector<Model> alone;
  std::vector<std::vector<at::Tensor>> gradients;
  std::vector<double> norms;
  const KernelTable kernels = table(kOwn, at::kFloat);
  for (int g = 0; g < 3; ++g) {
    Model model = make(at::kFloat), same = make(at::kFloat);
    AdamwOptions options;
    options.lr = 1e-3 * (g + 1), options.step = 1 + g, options.gradient_multiplier = 1.0 / (1 + g);
    gradients.emplace_back();
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      model.tensors[i].gradient = randn({kSizes[i]}, at::kFloat, 100 * g + i);
      same.tensors[i].gradient = model.tensors[i].gradient;
      gradients.back().push_back(model.tensors[i].gradient);
    }
    groups.push_back({model.tensors, options});
    adamw_step(kernels, same.tensors, options);
    alone.push_back(same);
    norms.push_back(gradient_norm(gradients.back()));
  }
  EXPECT_EQ(gradient_norms(gradients), norms);
  adamw_steps(kernels, groups);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      EXPECT_TRUE(identical(groups[g].tensors[i].parameter, alone[g].tensors[i].parameter));
      EXPECT_TRUE(identical(groups[g].tensors[i].exp_avg, alone[g].tensors[i].exp_avg));
    }
  }
}

TEST(Adamw, LateMultipliersReplaceThoseOfTheGroupsAndMayLeaveOneAsItIs) {
  const KernelTable kernels = table(kOwn, at::kFloat);
  std::vector<AdamwGroup> groups;
  std::vector<Model> expected;
  const std::vector<double> late = {0.5, std::numeric_limits<double>::quiet_NaN(), 2};
  for (std::size_t g = 0; g < late.size(); ++g) {
    Model model = make(at::kFloat), same = make(at::kFloat);
    AdamwOptions options;
    options.lr = 1e-3;
    for (std::size_t i = 0; i < kSizes.size(); ++i)
      model.tensors[i].gradient = same.tensors[i].gradient =
          randn({kSizes[i]}, at::kFloat, 100 * g + i);
    groups.push_back({model.tensors, options});
    options.gradient_multiplier = late[g];
    if (!std::isnan(late[g])) adamw_step(kernels, same.tensors, options);
    expected.push_back(same);
  }
  int calls = 0;
  adamw_steps(kernels, groups, [&] { return ++calls, late; });
  EXPECT_EQ(calls, 1);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < kSizes.size(); ++i) {
      EXPECT_TRUE(identical(groups[g].tensors[i].parameter, expected[g].tensors[i].parameter)) << g;
      EXPECT_TRUE(identical(groups[g].tensors[i].exp_avg, expected[g].tensors[i].exp_avg)) << g;
    }
  }
}

TEST(Adamw, SameBitsForEveryThreadCount) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  Model one = make(at::kBFloat16);
  steps(table(kOwn, at::kBFloat16), one, at::kBFloat16, 3);
  at::set_num_threads(2);
  Model two = make(at::kBFloat16);
  steps(table(kOwn, at::kBFloat16), two, at::kBFloat16, 3);
  at::set_num_threads(threads);
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    EXPECT_TRUE(identical(one.tensors[i].master, two.tensors[i].master));
    EXPECT_TRUE(identical(one.tensors[i].exp_avg_sq, two.tensors[i].exp_avg_sq));
  }
}

TEST(Adamw, RefusesAHalfPrecisionParameterWithoutAMaster) {
  Model model = make(at::kBFloat16);
  for (AdamwTensor& t : model.tensors) {
    t.master = at::Tensor(), t.gradient = t.parameter;
  }
  EXPECT_THROW(adamw_step(table(kOwn, at::kBFloat16), model.tensors, {}), c10::Error);
}

/// bf16 of x by the rule of rounding.h, one number at a time.
float rounded(float x, std::uint64_t bits) {
  std::uint32_t pattern = 0;
  std::memcpy(&pattern, &x, 4);
  pattern = (pattern + static_cast<std::uint32_t>(bits & 0xffff)) & 0xffff0000u;
  std::memcpy(&x, &pattern, 4);
  return x;
}

TEST(Adamw, RoundsBfloat16StateByKeyAndIndex) {
  AdamwTensor t;
  const std::int64_t n = 1023;
  t.parameter = randn({n}, at::kBFloat16, 1), t.gradient = randn({n}, at::kBFloat16, 2);
  t.exp_avg = randn({n}, at::kBFloat16, 3), t.exp_avg_sq = randn({n}, at::kBFloat16, 4).abs();
  t.weight_decay = 0.1;
  t.rounding_key = 0xfedcba9876543210u;
  AdamwTensor wide = t;
  wide.parameter = t.parameter.to(at::kFloat), wide.exp_avg = t.exp_avg.to(at::kFloat);
  wide.exp_avg_sq = t.exp_avg_sq.to(at::kFloat);
  AdamwOptions options;
  options.lr = 1e-3, options.step = 3;
  adamw_step(table("reference", at::kFloat), {wide}, options);
  adamw_step(table(kOwn, at::kBFloat16), {t}, options);
  const at::Tensor *found[] = {&t.parameter, &t.exp_avg, &t.exp_avg_sq},
                   *exact[] = {&wide.parameter, &wide.exp_avg, &wide.exp_avg_sq};
  const std::uint64_t key = rounding_key_of_step(t.rounding_key, 3);
  for (int kind = 0; kind < 3; ++kind) {
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint64_t bits = rounding_bits(key, static_cast<std::uint64_t>(i));
      ASSERT_EQ((*found[kind])[i].item().toFloat(),
                rounded((*exact[kind])[i].item().toFloat(), bits >> (16 * kind)))
          << kind << " element " << i;
    }
  }
}

// Steps of 1e-5 on weights near 1, where bf16 has steps of 4e-3 to 8e-3: rounded to nearest they
// would all be lost.
TEST(Adamw, StochasticRoundingKeepsTheMean) {
  AdamwTensor t;
  const std::int64_t n = 20000;
  t.parameter = (at::zeros({n}) + 1).to(at::kBFloat16);
  t.gradient = t.parameter.clone();
  t.exp_avg = at::zeros({n}, at::kBFloat16), t.exp_avg_sq = at::zeros({n}, at::kBFloat16);
  AdamwOptions options;
  options.lr = 1e-5;
  for (options.step = 1; options.step <= 20; ++options.step) {
    adamw_step(table(kOwn, at::kBFloat16), {t}, options);
  }
  // 20 steps of lr; the standard error of the mean is 1e-5.
  EXPECT_NEAR(t.parameter.to(at::kDouble).mean().item().toDouble(), 1 - 20e-5, 6e-5);
}

TEST(EightBit, CodesCoverTheRangeInOrderAndComeBackExactly) {
  for (const int bits : {eight_bit::kMomentBits, eight_bit::kRootBits}) {
    EXPECT_EQ(eight_bit::decoded(0, bits), 0);
    EXPECT_EQ(eight_bit::decoded((1 << bits) - 1, bits), 1);
    for (int code = 1; code < 1 << bits; ++code) {
      const float value = eight_bit::decoded(code, bits);
      EXPECT_GT(value, eight_bit::decoded(code - 1, bits));
      // A value between two codes becomes one of them; a code stays.
      for (const float random : {0.0F, 0.5F, 0.99F}) {
        EXPECT_EQ(eight_bit::encoded(value, random, bits, false), code);
        const float between = (value + eight_bit::decoded(code - 1, bits)) / 2;
        EXPECT_EQ(eight_bit::encoded(between, random, bits, false), random < 0.5F ? code - 1 : code)
            << code << " " << random;
      }
    }
  }
  EXPECT_EQ(eight_bit::encoded(1e-20F, 0, eight_bit::kRootBits, true), 1);
  EXPECT_EQ(eight_bit::encoded(0, 0.99F, eight_bit::kRootBits, true), 0);
}

TEST(EightBit, TensorsAreCodedAsNumbers) {
  // Magnitudes over ten decades, a block of zeros among them.
  at::Tensor values = randn({5, 512}, at::kFloat, 1);
  values.mul_(randn({5, 512}, at::kFloat, 2).mul_(4).exp_());
  values.narrow(0, 2, 1).narrow(1, 256, 256).zero_();
  const at::Tensor random = randn({5, 512}, at::kFloat, 3).abs_().frac_();
  for (const auto kind : {eight_bit::Kind::kMoment, eight_bit::Kind::kRoot}) {
    const bool is_root = kind == eight_bit::Kind::kRoot;
    const int bits = is_root ? eight_bit::kRootBits : eight_bit::kMomentBits;
    const at::Tensor x = is_root ? values.abs() : values;
    const at::Tensor codes = eight_bit::zero_codes(x), scales = eight_bit::zero_scales(x);
    ASSERT_EQ(scales.sizes(), (std::vector<std::int64_t>{5, 2}));
    eight_bit::encode(x, random, kind, codes, scales);
    const at::Tensor back = eight_bit::decoded(codes, scales, kind).cpu();
    const at::Tensor host = x.cpu(), host_random = random.cpu(), host_scales = scales.cpu();
    for (std::int64_t r = 0; r < 5; ++r) {
      for (std::int64_t c = 0; c < 512; ++c) {
        const float scale = host_scales[r][c / 256].item().toFloat();
        const float value = host[r][c].item().toFloat();
        float expected = 0;
        if (scale > 0) {
          const int code = eight_bit::encoded(std::abs(value) / scale,
                                              host_random[r][c].item().toFloat(), bits, is_root);
          expected = std::copysign(eight_bit::decoded(code, bits) * scale, value);
        }
        ASSERT_EQ(back[r][c].item().toFloat(), expected) << r << ", " << c;
      }
    }
  }
}

/// Steps with gradients of one direction and noise; `state`: kByte or kFloat moments.
at::Tensor parameter_after(int count, c10::ScalarType state) {
  AdamwTensor t;
  t.parameter = at::zeros({8, 256}, randn({1}, at::kFloat, 1).options());
  t.exp_avg = state == at::kByte ? eight_bit::zero_codes(t.parameter) : at::zeros_like(t.parameter);
  t.exp_avg_sq = t.exp_avg.clone();
  if (state == at::kByte) {
    t.exp_avg_scale = eight_bit::zero_scales(t.parameter);
    t.exp_avg_sq_scale = t.exp_avg_scale.clone();
  }
  t.rounding_key = 77;
  // Each column has gradients of its own magnitude, from 1e-4 to 1.
  const at::Tensor size = randn({256}, at::kFloat, 5).abs_().mul_(-3).exp_();
  AdamwOptions options;
  options.lr = 1e-3, options.beta2 = 0.99;
  for (options.step = 1; options.step <= count; ++options.step) {
    t.gradient = (randn({8, 256}, at::kFloat, 100 + options.step) + 0.5) * size;
    adamw_step(table(kOwn, at::kFloat), {t}, options);
  }
  return t.parameter;
}

TEST(Adamw, EightBitMomentsFollowWideOnes) {
  const at::Tensor exact = parameter_after(200, at::kFloat),
                   coded = parameter_after(200, at::kByte);
  const double error = (coded - exact).norm().item().toDouble() / exact.norm().item().toDouble();
  EXPECT_LT(error, 0.08);  // gradients over four decades share blocks
  EXPECT_GT(error, 1e-6);  // they are coded
  // No drift: errors of single elements cancel.
  EXPECT_NEAR((coded.mean() / exact.mean()).item().toDouble(), 1, 3e-3);
}

TEST(Adamw, RefusesEightBitMomentsWithoutScales) {
  AdamwTensor t;
  t.parameter = t.gradient = randn({2, 256}, at::kFloat, 1);
  t.exp_avg = t.exp_avg_sq = eight_bit::zero_codes(t.parameter);
  EXPECT_THROW(adamw_step(table(kOwn, at::kFloat), {t}, {}), c10::Error);
}

TEST(Sgd, AppliesMomentumDecayAndMultiplier) {
  const at::Tensor start = randn({257}, at::kFloat, 1);
  SgdTensor t;
  t.master = start.clone();
  t.parameter = start.to(at::kBFloat16);
  t.momentum_buffer = at::zeros({257}, start.options());
  t.weight_decay = 0.01;
  at::Tensor p = start.to(at::kDouble), buffer;
  for (int step = 0; step < 4; ++step) {
    t.gradient = randn({257}, at::kFloat, 50 + step);
    sgd_step({t}, 0.1, 0.9, step == 0, 0.5);
    const at::Tensor g = t.gradient.to(at::kDouble) * 0.5 + p * 0.01;
    buffer = step == 0 ? g : buffer * 0.9 + g;
    p = p - buffer * 0.1;
  }
  EXPECT_TRUE(close(t.master, p, 1e-6));
  EXPECT_TRUE(identical(t.parameter, t.master.to(at::kBFloat16)));
}

TEST(GradientNorm, SumsAllTensorsInDouble) {
  std::vector<at::Tensor> gradients;
  double expected = 0;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    const c10::ScalarType dtype = kernel_dtypes()[i % 3];
    gradients.push_back(randn({kSizes[i]}, dtype, 10 + i));
    expected += (gradients.back().to(at::kDouble) * gradients.back().to(at::kDouble))
                    .sum()
                    .item()
                    .toDouble();
  }
  gradients.push_back(at::Tensor());
  gradients.push_back(with_poisoned_gaps(randn({9, 11}, at::kFloat, 5)));
  expected += gradients.back().to(at::kDouble).pow(2).sum().item().toDouble();
  EXPECT_NEAR(gradient_norm(gradients), std::sqrt(expected), 1e-12 * std::sqrt(expected));
  EXPECT_EQ(gradient_norm({}), 0);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const double one = gradient_norm(gradients);
  at::set_num_threads(2);
  EXPECT_EQ(one, gradient_norm(gradients));
  at::set_num_threads(threads);
}

TEST(AreZero, SeesTheSmallestNumbersAndNaN) {
  std::vector<at::Tensor> tensors;
  std::vector<bool> expected;
  const auto add = [&](at::Tensor tensor, bool is_zero) {
    tensors.push_back(std::move(tensor));
    expected.push_back(is_zero);
  };
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const std::int64_t size : kSizes) {
      const at::Tensor zeros = at::zeros({size}, dtype);
      add(zeros, true);
      if (size == 0) continue;
      for (const double value : {1e-38, -1e-38, std::numeric_limits<double>::quiet_NaN()}) {
        at::Tensor one = zeros.clone();
        one[size / 2].fill_(value);
        add(one, false);
      }
    }
  }
  EXPECT_EQ(are_zero(tensors), expected);
  EXPECT_TRUE(are_zero({}).empty());
}

}  // namespace
}  // namespace heddle::ops::testing
