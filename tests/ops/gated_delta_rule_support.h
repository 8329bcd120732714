#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/gated_delta_net/gated_delta_net.h"
#include "ops/operator_support.h"

/// Problems for the kernels of the gated delta rule, shared by the tests of all devices.
namespace heddle::ops::testing {

enum class Gate { kLogSigmoid, kInitialisation, kZero, kMixed };
enum class Keys { kRandom, kCorrelated, kIdentical, kAlternating };

struct Case {
  std::vector<std::int32_t> lengths;
  std::int64_t Hk = 1, group = 2, K = 16, V = 16;
  Gate gate = Gate::kLogSigmoid;
  Keys keys = Keys::kRandom;
  double beta_shift = 0;    // of the logits: -60 is beta near 0, 20 is beta 1
  bool beta_edges = false;  // tokens have 0, 1e-30, 1e-6, 1e-3, 0.999 and 1 in turn
  bool initial = true, normalize = true;
  double scale = 0;

  std::string text() const {
    std::string s = "lengths";
    for (const std::int32_t n : lengths) s += " " + std::to_string(n);
    return s + ", heads " + std::to_string(Hk) + "x" + std::to_string(group) + ", K " +
           std::to_string(K) + ", V " + std::to_string(V) + ", gate " +
           std::to_string(static_cast<int>(gate)) + ", keys " +
           std::to_string(static_cast<int>(keys)) +
           (beta_edges ? ", beta at its edges" : ", beta shift " + std::to_string(beta_shift));
  }
};

/// A shape of `heads` key heads, each with `group` value heads, K = V = dim.
inline Case shape(std::vector<std::int32_t> lengths, std::int64_t heads, std::int64_t group,
                  std::int64_t dim = 128) {
  Case c;
  c.lengths = std::move(lengths);
  c.Hk = heads;
  c.group = group;
  c.K = c.V = dim;
  return c;
}

struct Problem {
  Tensors inputs;  // q, k, v, g, beta, initial_state (or none)
  Sequences sequences;
  GatedDeltaRuleOptions options;
};

/// Inputs rounded to `dtype` (gates and states to fp32 or wider), so that all kernels see the same
/// numbers.
Problem make(const Case& c, c10::ScalarType dtype);
/// The numbers in fp64.
Problem in_double(Problem p);
/// The numbers on another device.
Problem on_device(Problem p, c10::Device device);

/// {o, final_state} of p's operator for inputs x.
Tensors call(const Problem& p, const KernelTable& kernels, const Tensors& x);

/// Results of run(), by name.
const std::vector<std::string>& names();
/// Outputs and gradients, in the order of names().
Tensors run(const Problem& p, const KernelTable& kernels);
/// Results of the recurrence, in double on the CPU.
Tensors run_exactly(const Problem& p);

/// Root of the sum of squared differences, relative to that of `expected`.
double rms_error(const at::Tensor& found, const at::Tensor& expected);

}  // namespace heddle::ops::testing
