// Recurrent states of bf16: a step computes as with wide states, and rounds once when it stores.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "ops/compute_type.h"
#include "ops/gated_delta_net/gated_delta_rule_decode.h"
#include "ops/operator_support.h"

namespace heddle::ops {
namespace {

using testing::device;
using testing::identical;
using testing::Kernel;
using testing::kOwn;
using testing::randn;

/// Half the distance between two numbers of bf16, relative to them, at most.
constexpr double kRoundoff = 1.0 / 256;

class RoundedStates : public ::testing::TestWithParam<Kernel> {
 protected:
  RoundedStates()
      : kernels_(testing::table_of(testing::any<GatedDeltaRuleDecode>(), GetParam().name,
                                   GetParam().dtype)) {}

  /// Inputs of step t of `batch` sequences, on the device.
  GatedDeltaRuleDecode::Inputs step(std::int64_t batch, std::uint64_t t) const {
    const auto x = [&](std::int64_t heads, std::int64_t dim, std::uint64_t seed) {
      return randn({batch, heads, dim}, at::kFloat, 10 * t + seed).to(GetParam().dtype);
    };
    const c10::ScalarType wide = compute_type(GetParam().dtype);
    return {x(kHk, kK, 1),
            x(kHk, kK, 2),
            x(kHv, kV, 3),
            -randn({batch, kHv}, at::kFloat, 10 * t + 4).abs().mul(0.1).to(wide),
            randn({batch, kHv}, at::kFloat, 10 * t + 5).sigmoid().to(wide),
            {}};
  }
  at::Tensor decode(GatedDeltaRuleDecode::Inputs inputs, const at::Tensor& states,
                    const std::vector<std::int64_t>& slots) const {
    inputs.states = states;
    const std::vector<std::int64_t> lengths(slots.size());
    return gated_delta_rule_decode(kernels_, inputs,
                                   CacheRows::from_host(slots, lengths, device()));
  }
  c10::ScalarType wide() const { return compute_type(GetParam().dtype); }

  static constexpr std::int64_t kHk = 2, kHv = 4, kK = 32, kV = 48;
  KernelTable kernels_;
};

TEST_P(RoundedStates, AreThoseOfAWideStepRoundedOnce) {
  const std::vector<std::int64_t> slots = {4, 0, 2};
  at::Tensor states = randn({5, kHv, kK, kV}, at::kFloat, 9).to(at::kBFloat16);
  for (std::uint64_t t = 0; t < 8; ++t) {
    const GatedDeltaRuleDecode::Inputs inputs = step(3, t);
    at::Tensor exact = states.to(wide());
    const at::Tensor expected = decode(inputs, exact, slots);
    const at::Tensor o = decode(inputs, states, slots);
    EXPECT_TRUE(identical(o.cpu(), expected.cpu())) << t;
    EXPECT_TRUE(identical(states.cpu(), exact.to(at::kBFloat16).cpu())) << t;
  }
}

TEST_P(RoundedStates, GoToTheNearestAndTiesToTheEvenOne) {
  if (GetParam().dtype == at::kDouble) GTEST_SKIP() << "rounded by way of fp32";
  // Between 1 and the numbers of bf16 after it, 1 + 2 h and 1 + 4 h: a tie below, one above, and
  // numbers next to a tie.
  const double h = kRoundoff, little = std::ldexp(1, -20);
  const std::vector<std::pair<double, double>> cases = {{1 + h, 1},
                                                        {1 + 3 * h, 1 + 4 * h},
                                                        {1 + h + little, 1 + 2 * h},
                                                        {1 + h - little, 1},
                                                        {1 + 3 * h - little, 1 + 2 * h}};
  for (const auto& [value, expected] : cases) {
    GatedDeltaRuleDecode::Inputs in = step(1, 0);
    in.normalize_qk = false;
    // The state after it is beta k v^T.
    in.k = at::full({1, kHk, kK}, 0, in.k.options());
    in.k.select(2, 0).fill_(1);
    in.v = at::full({1, kHv, kV}, 1, in.v.options());
    in.g = at::full({1, kHv}, 0, in.g.options());
    in.beta = at::full({1, kHv}, value, in.beta.options());
    at::Tensor states =
        at::zeros({1, kHv, kK, kV}, at::TensorOptions().dtype(at::kBFloat16).device(device()));
    decode(in, states, {0});
    EXPECT_EQ(states.select(2, 0).cpu().to(at::kDouble).min().item<double>(), expected) << value;
    EXPECT_EQ(states.select(2, 0).cpu().to(at::kDouble).max().item<double>(), expected) << value;
  }
}

TEST_P(RoundedStates, DriftStaysWithinTheSumOfTheirRoundings) {
  // A step maps an error E of the state to e^g (I - beta k k^T) E, k of length 1 and beta below 1,
  // which makes it no longer than e^g E; and rounding adds at most kRoundoff of the state.
  const std::vector<std::int64_t> slots = {0};
  const auto options = at::TensorOptions().dtype(at::kBFloat16).device(device());
  at::Tensor states = at::zeros({1, kHv, kK, kV}, options), exact = states.to(wide());
  double bound = 0, largest = 0;
  for (std::uint64_t t = 0; t < 400; ++t) {
    const GatedDeltaRuleDecode::Inputs inputs = step(1, t);
    decode(inputs, states, slots);
    decode(inputs, exact, slots);
    const at::Tensor wide_states = states.cpu().to(at::kDouble);
    const double error =
        at::linalg_vector_norm(wide_states - exact.cpu().to(at::kDouble)).item<double>();
    // The stored state is within kRoundoff of what was rounded.
    const double size = at::linalg_vector_norm(wide_states).item<double>() / (1 - kRoundoff);
    bound = std::exp(inputs.g.max().item<double>()) * bound + kRoundoff * size;
    ASSERT_LE(error, bound) << t;
    largest = std::max(largest, error / size);
  }
  // They do round: less than this would be wide states.
  EXPECT_GT(largest, kRoundoff / 8);
}

std::vector<Kernel> all_kernels() {
  std::vector<Kernel> kernels;
  for (const char* name : {kOwn, "reference"}) {
    for (const auto dtype : testing::kernel_dtypes()) kernels.push_back({name, dtype});
  }
  return kernels;
}

INSTANTIATE_TEST_SUITE_P(All, RoundedStates, ::testing::ValuesIn(all_kernels()),
                         heddle::testing::ParameterName());

}  // namespace
}  // namespace heddle::ops
