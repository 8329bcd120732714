// The gated delta rule, its gates, the gated norm and the causal convolution on the CPU: our
// kernels and the composite of ATen operators ("reference") in one run, best of several
// repetitions.
//   gated_delta_net_bench [repetitions] [per-token]
// With per-token, alone the loop over tokens against chunks, of libtorch's operators.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/gated_delta_net/gated_delta_net.h"
#include "ops/gated_delta_net/gated_delta_rule_decode.h"

namespace {

using namespace heddle::ops;

double best_ms(int repetitions, const std::function<void()>& work) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double, std::milli> passed =
        std::chrono::steady_clock::now() - start;
    best = std::min(best, passed.count());
  }
  return best;
}

template <class Op>
KernelTable table(const std::string& kernel, c10::ScalarType dtype) {
  KernelPolicy policy;
  policy.named[Op::kName] = kernel;
  return KernelTable::choose(builtin_registry(), {}, dtype, {OpRequest::of<Op>()}, policy);
}

/// Names of the kernels of `op` on the CPU, the oracle left out.
std::vector<std::string> kernels_of(const std::string& op) {
  std::vector<std::string> names;
  for (const Registry::Entry& entry : builtin_registry().entries()) {
    const auto& on = entry.info.platforms;
    const bool here = on.empty() || std::ranges::find(on, Platform::kCpu) != on.end();
    if (entry.info.op == op && here && !entry.info.only_by_name) {
      names.push_back(entry.info.name);
    }
  }
  return names;
}

struct Shape {
  const char* name;
  std::int64_t sequences, length, Hk, Hv, D;
  std::int64_t tokens() const { return sequences * length; }
  std::int64_t channels() const { return (2 * Hk + Hv) * D; }
  Sequences packed() const {
    std::vector<std::int32_t> cu;
    for (std::int64_t s = 0; s <= sequences; ++s) cu.push_back(static_cast<int>(s * length));
    return Sequences::from_host(cu, at::kCPU);
  }
};

void rule(const Shape& s, c10::ScalarType dtype, int repetitions) {
  const std::int64_t T = s.tokens();
  const at::Tensor qkv = at::randn({T, s.channels()}, dtype);
  const auto parts = split_qkv(qkv, s.Hk, s.D, s.Hv, s.D);
  const GatedDeltaRule::Inputs in{parts[0],
                                  parts[1],
                                  parts[2],
                                  at::log_sigmoid(at::randn({T, s.Hv})) / 16,
                                  at::sigmoid(at::randn({T, s.Hv})),
                                  {},
                                  s.packed(),
                                  {}};
  const at::Tensor grad = at::randn({T, s.Hv, s.D}, dtype);
  for (const std::string& name : kernels_of("gated_delta_rule")) {
    const auto functions = table<GatedDeltaRule>(name, dtype).get<GatedDeltaRule>();
    const int n = name == "reference" ? std::max(1, repetitions / 10) : repetitions;
    GatedDeltaRuleForward out;
    const double infer = best_ms(n, [&] { functions.forward(in, false); });
    const double forward = best_ms(n, [&] { out = functions.forward(in, true); });
    const double backward = best_ms(n, [&] { functions.backward(in, out, grad, {}); });
    // The products that the chunked form of chunk 16 needs, triangles counted in full.
    const double macs = static_cast<double>(T * s.Hv) * static_cast<double>(9 * s.D * s.D) +
                        static_cast<double>(T * s.Hv) * 10.5 * 16 * static_cast<double>(s.D);
    fmt::print(
        "{:22} {:8} {:10} infer {:7.2f}  forward {:7.2f}  backward {:7.2f}  both {:7.2f} ms"
        "  {:5.1f} GFLOP/s\n",
        s.name, c10::toString(dtype), name, infer, forward, backward, forward + backward,
        2e-6 * macs / (forward + backward));
  }
}

void step(std::int64_t B, std::int64_t Hk, std::int64_t Hv, std::int64_t D, int repetitions) {
  at::Tensor states = at::zeros({B, Hv, D, D});
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < B; ++i) slots.push_back(i);
  const at::Tensor q = at::randn({B, Hk, D}), k = at::randn({B, Hk, D}), v = at::randn({B, Hv, D});
  const at::Tensor g = at::full({B, Hv}, -0.1), beta = at::full({B, Hv}, 0.5);
  const CacheRows rows = CacheRows::from_host(slots, slots, at::kCPU);
  for (const std::string& name : kernels_of("gated_delta_rule_decode")) {
    const KernelTable kernels = table<GatedDeltaRuleDecode>(name, at::kFloat);
    const double ms = best_ms(repetitions, [&] {
      gated_delta_rule_decode(kernels, {q, k, v, g, beta, states}, rows);
    });
    const double bytes = 2.0 * static_cast<double>(states.numel()) * 4;
    fmt::print("step B={:<3} {}/{}x{} {:10} {:8.3f} ms  {:6.1f} GB/s of states\n", B, Hk, Hv, D,
               name, ms, bytes / ms * 1e-6);
  }
}

/// The chunked form of libtorch's operators, which NPUs train with, and a loop over tokens of the
/// same operators.
void per_token(const Shape& s, int repetitions) {
  const std::int64_t T = s.tokens();
  const at::Tensor q = at::randn({T, s.Hk, s.D}), k = at::randn({T, s.Hk, s.D}),
                   v = at::randn({T, s.Hv, s.D});
  const at::Tensor g = at::log_sigmoid(at::randn({T, s.Hv})) / 16,
                   beta = at::sigmoid(at::randn({T, s.Hv}));
  const auto functions = table<GatedDeltaRule>("reference", at::kFloat).get<GatedDeltaRule>();
  const KernelTable decoding = table<GatedDeltaRuleDecode>("reference", at::kFloat);
  const CacheRows rows = CacheRows::from_host({0}, {0}, at::kCPU);
  at::Tensor states = at::zeros({1, s.Hv, s.D, s.D});
  const Sequences one = Sequences::from_host({0, static_cast<std::int32_t>(T)}, at::kCPU);
  double loop = std::numeric_limits<double>::infinity(), chunks = loop;
  for (int i = 0; i < repetitions; ++i) {  // in turn, so that both see the same machine
    loop = std::min(loop, best_ms(1, [&] {
                      for (std::int64_t t = 0; t < T; ++t) {
                        const auto row = [&](const at::Tensor& x) { return x.narrow(0, t, 1); };
                        gated_delta_rule_decode(
                            decoding, {row(q), row(k), row(v), row(g), row(beta), states}, rows);
                      }
                    }));
    chunks = std::min(chunks, best_ms(3, [&] {
                        functions.forward({q, k, v, g, beta, {}, s.packed(), {}}, false);
                      }));
  }
  fmt::print("{:22} libtorch's operators: per token {:7.1f}  chunks of 64 {:7.1f} ms  {:4.1f} x\n",
             s.name, loop, chunks, loop / chunks);
}

void convolution(const Shape& s, c10::ScalarType dtype, int repetitions) {
  const at::Tensor x = at::randn({s.tokens(), s.channels()}, dtype);
  const at::Tensor w = at::randn({s.channels(), 4}, dtype), grad = at::randn(x.sizes(), dtype);
  const CausalConv1d::Inputs in{x, w, {}, s.packed(), false};
  for (const std::string& name : kernels_of("causal_conv1d")) {
    const auto functions = table<CausalConv1d>(name, dtype).get<CausalConv1d>();
    const double forward = best_ms(repetitions, [&] { functions.forward(in); });
    const double backward = best_ms(repetitions, [&] { functions.backward(in, grad, {}); });
    fmt::print("conv {:17} {:8} {:10} forward {:7.2f}  backward {:7.2f} ms\n", s.name,
               c10::toString(dtype), name, forward, backward);
  }
}

void gates_and_norm(const Shape& s, c10::ScalarType dtype, int repetitions) {
  const std::int64_t T = s.tokens();
  const at::Tensor a = at::randn({T, s.Hv}, dtype), b = at::randn({T, s.Hv}, dtype);
  const at::Tensor a_log = at::randn({s.Hv}), dt_bias = at::ones({s.Hv});
  const at::Tensor dg = at::randn({T, s.Hv});
  for (const std::string& name : kernels_of("gdn_gates")) {
    const auto functions = table<GdnGates>(name, dtype).get<GdnGates>();
    const auto out = functions.forward(a, b, a_log, dt_bias);
    const double forward = best_ms(repetitions, [&] { functions.forward(a, b, a_log, dt_bias); });
    const double backward = best_ms(repetitions, [&] {
      functions.backward(a, b, a_log, dt_bias, out.first, out.second, dg, dg,
                         /*wants_parameters=*/true);
    });
    fmt::print("gates {:16} {:8} {:10} forward {:7.2f}  backward {:7.2f} ms\n", s.name,
               c10::toString(dtype), name, forward, backward);
  }
  const at::Tensor x = at::randn({T, s.Hv, s.D}, dtype), z = at::randn(x.sizes(), dtype);
  const at::Tensor w = at::ones({s.D}), grad = at::randn(x.sizes(), dtype);
  for (const std::string& name : kernels_of("gated_rms_norm")) {
    const auto functions = table<GatedRmsNorm>(name, dtype).get<GatedRmsNorm>();
    const auto out = functions.forward(x, z, w, 1e-6);
    const double forward = best_ms(repetitions, [&] { functions.forward(x, z, w, 1e-6); });
    const double backward = best_ms(repetitions, [&] {
      functions.backward({x, z, w, out.second, grad});
    });
    fmt::print("norm {:17} {:8} {:10} forward {:7.2f}  backward {:7.2f} ms\n", s.name,
               c10::toString(dtype), name, forward, backward);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 20;
  const NoGradient guard;
  fmt::print("{} threads\n", at::get_num_threads());
  const Shape small{"4x512 4/8 heads 64", 4, 512, 4, 8, 64};
  const Shape large{"2x1024 4/8 heads 128", 2, 1024, 4, 8, 128};
  const Shape single{"1x2048 2/8 heads 128", 1, 2048, 2, 8, 128};
  if (argc > 2) {
    for (const Shape& s : {large, single}) per_token(s, repetitions);
    return 0;
  }
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const Shape& s : {small, large, single}) rule(s, dtype, repetitions);
  }
  for (const Shape& s : {large, single}) per_token(s, std::max(1, repetitions / 10));
  for (const std::int64_t B : {1, 16}) step(B, 4, 8, 128, repetitions * 20);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const Shape& s : {small, large}) convolution(s, dtype, repetitions);
    for (const Shape& s : {small, large}) gates_and_norm(s, dtype, repetitions);
  }
  return 0;
}
