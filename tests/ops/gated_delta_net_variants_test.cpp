// The kernels of every instruction set that this processor has, not only of the one that is chosen.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include <c10/util/BFloat16.h>

#include "ops/causal_conv1d/cpu/conv_kernels.h"
#include "ops/cpu_dispatch.h"
#include "ops/gated_delta_net/cpu/norm_kernels.h"
#include "ops/gated_delta_net/cpu/rule_kernels.h"

namespace heddle::ops {
namespace {

using Values = std::vector<float>;

Values random(long count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  Values values(static_cast<std::size_t>(count));
  for (float& v : values) v = normal(engine);
  return values;
}

std::size_t usable() { return 1 + static_cast<std::size_t>(heddle_cpu_capability()); }

void expect_close(const std::vector<Values>& found, const std::vector<Values>& expected,
                  double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    double scale = 1e-3, error = 0;
    for (std::size_t j = 0; j < found[i].size(); ++j) {
      scale = std::max(scale, std::fabs(static_cast<double>(expected[i][j])));
      error = std::max(error, std::fabs(static_cast<double>(found[i][j]) - expected[i][j]));
      ASSERT_TRUE(std::isfinite(found[i][j])) << "result " << i << " entry " << j;
    }
    EXPECT_LE(error, tolerance * scale) << "result " << i;
  }
}

std::vector<Values> run_rule(const gdn_cpu::RuleKernels& kernels, long K, long V) {
  using namespace gdn_cpu;
  const std::vector<int> cu{0, 70, 70, 99};
  const std::vector<long> segments{0, 2, 2, 3};
  RuleArgs a{};
  a.Hk = 2;
  a.Hv = 4;
  a.K = K;
  a.V = V;
  a.T = 99;
  a.scale = 0.3;
  a.normalize = true;
  a.cu_seqlens = cu.data();
  a.first_segment = segments.data();
  const long row = (2 * a.Hk) * K + a.Hv * V, state = K * V;
  const Values qkv = random(a.T * row, 1), initial = random(3 * a.Hv * state, 2);
  const Values d_o = random(a.T * a.Hv * V, 3), d_final = random(3 * a.Hv * state, 4);
  Values g = random(a.T * a.Hv, 5), beta = random(a.T * a.Hv, 6);
  for (float& v : g) v = -0.3f * std::fabs(v);
  for (float& v : beta) v = 1 / (1 + std::exp(-v));
  const auto room = [](long n) { return Values(static_cast<std::size_t>(n)); };
  Values o = room(a.T * a.Hv * V), final = room(3 * a.Hv * state), error = o,
         states = room(3 * a.Hv * state), dqkv = room(a.T * row), dg = room(a.T * a.Hv), dbeta = dg,
         d_initial = final;
  a.q = qkv.data();
  a.k = qkv.data() + a.Hk * K;
  a.v = qkv.data() + 2 * a.Hk * K;
  a.dq = dqkv.data();
  a.dk = dqkv.data() + a.Hk * K;
  a.dv = dqkv.data() + 2 * a.Hk * K;
  a.q_stride = a.k_stride = a.v_stride = a.dq_stride = a.dk_stride = a.dv_stride = row;
  a.g = g.data();
  a.beta = beta.data();
  a.initial = initial.data();
  a.o = o.data();
  a.final = final.data();
  a.error = error.data();
  a.states = states.data();
  a.d_o = d_o.data();
  a.d_final = d_final.data();
  a.dg = dg.data();
  a.dbeta = dbeta.data();
  a.d_initial = d_initial.data();
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> scratch(
      std::max(kernels.forward_bytes(a, 2), kernels.backward_bytes(a, 2)) / 64 + 1);
  for (const auto work : {kernels.forward[0], kernels.backward[0]}) {
    for (long s = 0; s < 3; ++s) {
      for (long h = 0; h < a.Hk; ++h) work(a, {s, h, 2 * h, 2, 0}, scratch.data());
    }
  }
  std::vector<Values> results{o, final, dqkv, dg, dbeta, d_initial};

  // Gradients with each value head as a share of its own.
  Values dq_parts = room(2 * a.T * a.Hk * K), dk_parts = dq_parts;
  a.dq_parts = dq_parts.data();
  a.dk_parts = dk_parts.data();
  std::fill(dqkv.begin(), dqkv.end(), 0.f);
  for (long s = 0; s < 3; ++s) {
    for (long h = 0; h < a.Hv; ++h) {
      kernels.backward[0](a, {s, h / 2, h, 1, h % 2}, scratch.data());
    }
  }
  kernels.reduce[0](a, 2, 0, a.T);
  expect_close({dqkv}, {results[2]}, 2e-6);

  // One step of each head after the last state.
  Values stepped = final;
  for (long h = 0; h < a.Hv; ++h) kernels.step[0][0](a, 98, h, stepped.data() + h * state);
  results.push_back(stepped);
  results.push_back(o);

  // The step from a state of bf16 is that from the wide state of its numbers, rounded.
  std::vector<c10::BFloat16> half(final.begin(), final.end());
  Values widened(half.begin(), half.end()), o_of_half = o;
  for (long h = 0; h < a.Hv; ++h) kernels.step[0][1](a, 98, h, half.data() + h * state);
  std::swap(o, o_of_half);
  a.o = o.data();
  for (long h = 0; h < a.Hv; ++h) kernels.step[0][0](a, 98, h, widened.data() + h * state);
  EXPECT_EQ(o, o_of_half);
  EXPECT_TRUE(std::equal(half.begin(), half.end(), widened.begin(), [](c10::BFloat16 x, float y) {
    return static_cast<float>(x) == static_cast<float>(c10::BFloat16(y));
  }));
  return results;
}

TEST(CpuVariants, GatedDeltaRule) {
  const std::vector<const gdn_cpu::RuleKernels& (*)()> each = [] {
    using namespace gdn_cpu;
    return std::vector<const RuleKernels& (*)()> HEDDLE_CPU_EACH(rule_kernels);
  }();
  for (const auto& [K, V] : std::vector<std::pair<long, long>>{{16, 16}, {48, 80}, {128, 64}}) {
    const std::vector<Values> narrow = run_rule(each[0](), K, V);
    for (std::size_t i = 1; i < usable(); ++i) {
      SCOPED_TRACE(i);
      expect_close(run_rule(each[i](), K, V), narrow, 1e-5);
    }
  }
}

std::vector<Values> run_norm(const gdn_cpu::NormKernels& kernels) {
  const long T = 7, H = 3, V = 48;
  const Values x = random(T * H * V, 1), z = random(T * H * V, 2), w = random(V, 3),
               dy = random(T * H * V, 4);
  Values y = x, rstd(static_cast<std::size_t>(T * H)), dx = x, dz = x,
         dw(static_cast<std::size_t>(V));
  const gdn_cpu::NormArgs a{H,        V,        1e-6,        x.data(),  z.data(),  H * V,    H * V,
                            w.data(), y.data(), rstd.data(), dy.data(), dx.data(), dz.data()};
  kernels.forward[0](a, 0, T * H);
  kernels.backward[0](a, 0, T * H, dw.data());
  return {y, rstd, dx, dz, dw};
}

TEST(CpuVariants, GatedRmsNorm) {
  const std::vector<const gdn_cpu::NormKernels& (*)()> each = [] {
    using namespace gdn_cpu;
    return std::vector<const NormKernels& (*)()> HEDDLE_CPU_EACH(norm_kernels);
  }();
  const std::vector<Values> narrow = run_norm(each[0]());
  for (std::size_t i = 1; i < usable(); ++i) expect_close(run_norm(each[i]()), narrow, 2e-6);
}

std::vector<Values> run_conv(const conv_cpu::ConvKernels& kernels, long C) {
  const std::vector<int> cu{0, 60};
  const long T = 60, W = 4;
  const Values x = random(T * C, 1), w = random(W * C, 2), initial = random((W - 1) * C, 3),
               dy = random(T * C, 4), d_final = random((W - 1) * C, 5);
  Values y = x, dx = x, d_initial = initial, dw = w;
  conv_cpu::ConvArgs a{};
  a.C = C;
  a.W = W;
  a.cu_seqlens = cu.data();
  a.x = x.data();
  a.x_stride = C;
  a.weight = w.data();
  a.initial = initial.data();
  a.y = y.data();
  a.dy = dy.data();
  a.d_final = d_final.data();
  a.dx = dx.data();
  a.d_initial = d_initial.data();
  a.dw_blocks = dw.data();
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> scratch(kernels.scratch_bytes / 64 + 1);
  const conv_cpu::ConvUnit unit{0, 0, T, 0, C, 0};
  kernels.forward[0](a, unit, scratch.data());
  kernels.backward[0](a, unit, scratch.data());
  Values state = initial, out(static_cast<std::size_t>(C));
  kernels.step[0](x.data(), w.data(), state.data(), out.data(), C, W);
  return {y, dx, d_initial, dw, state, out};
}

TEST(CpuVariants, CausalConv1d) {
  const std::vector<const conv_cpu::ConvKernels& (*)()> each = [] {
    using namespace conv_cpu;
    return std::vector<const ConvKernels& (*)()> HEDDLE_CPU_EACH(conv_kernels);
  }();
  for (const long C : {3, 32, 77}) {
    const std::vector<Values> narrow = run_conv(each[0](), C);
    for (std::size_t i = 1; i < usable(); ++i) expect_close(run_conv(each[i](), C), narrow, 2e-6);
  }
}

}  // namespace
}  // namespace heddle::ops
