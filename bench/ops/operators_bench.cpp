// Every operator of the step except the gated delta rule: the CPU kernel against its definition in
// ATen operators, forward and backward, at the sizes of the 9.5M and 55M models. The two take
// turns, so that both see the same machine; the fastest of the turns counts.
//   heddle_operators_bench [turns] [part of a name]
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "ops/attention/attention.h"
#include "ops/attention/attention_decode.h"
#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/moe/moe.h"
#include "ops/optimizer_step/optimizer_step.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rotary/rotary.h"
#include "ops/swiglu/swiglu.h"

namespace heddle::ops {
namespace {

using Work = std::function<void()>;

int turns = 7;
std::string filter;

double seconds_of(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// `amount` in GB or GFLOP moved or computed by one call.
void row(const std::string& name, double amount, const char* unit, const Work& kernel,
         const Work& other, const char* other_name) {
  if (name.find(filter) == std::string::npos) return;
  kernel();
  other();
  double fast = std::numeric_limits<double>::max(), slow = fast;
  for (int i = 0; i < turns; ++i) {
    fast = std::min(fast, seconds_of(kernel));
    slow = std::min(slow, seconds_of(other));
  }
  fmt::print("{:<46} {:>9.3f} ms {:>8.1f} {:<7} {:<10} {:>9.3f} ms  x{:.2f}\n", name, fast * 1e3,
             amount / fast, unit, other_name, slow * 1e3, slow / fast);
}

template <class Op>
KernelTable table(const char* name, c10::ScalarType dtype) {
  KernelPolicy policy;
  policy.named[Op::kName] = name;
  return KernelTable::choose(builtin_registry(), {}, dtype, {OpRequest::of<Op>()}, policy);
}

at::Tensor randn(at::IntArrayRef sizes, c10::ScalarType dtype) {
  return at::randn(sizes).to(dtype);
}

double gigabytes(const at::Tensor& x, double times) {
  return times * static_cast<double>(x.nbytes()) * 1e-9;
}

void norms(c10::ScalarType dtype, std::int64_t tokens, std::int64_t hidden) {
  const std::string shape = fmt::format("[{},{}] {}", tokens, hidden, c10::toString(dtype));
  const auto x = randn({tokens, hidden}, dtype), residual = randn({tokens, hidden}, dtype),
             w = randn({hidden}, dtype), dy = randn({tokens, hidden}, dtype);
  const auto run = [&](const char* name, bool back) -> Work {
    const KernelTable t = table<RmsNorm>(name, dtype);
    const auto f = t.get<RmsNorm>();
    const auto saved = f.forward(x, residual, w, 1e-6);
    if (!back) return [=] { f.forward(x, residual, w, 1e-6); };
    return [=] { f.backward({saved.sum, w, saved.rstd, dy, /*grad_y_2=*/{}, /*grad_sum=*/dy}); };
  };
  row("add_rms_norm forward " + shape, gigabytes(x, 4), "GB/s", run("cpu", false),
      run("reference", false), "reference");
  row("add_rms_norm backward " + shape, gigabytes(x, 4), "GB/s", run("cpu", true),
      run("reference", true), "reference");
}

void rope(c10::ScalarType dtype, std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  const std::string shape = fmt::format("[{},{},{}] {}", tokens, heads, dim, c10::toString(dtype));
  const auto x = randn({tokens, heads, 2 * dim}, dtype).narrow(2, 0, dim), w = randn({dim}, dtype),
             dy = randn({tokens, heads, dim}, dtype);
  const auto tables = rotary_tables(at::arange(tokens), dim / 4, 1e7, {}, dtype);
  const auto run = [&](const char* name, bool back) -> Work {
    const KernelTable t = table<QkNormRope>(name, dtype);
    const auto f = t.get<QkNormRope>();
    const auto saved = f.forward(x, w, tables.first, tables.second, 1e-6);
    if (!back) return [=] { f.forward(x, w, tables.first, tables.second, 1e-6); };
    return [=] { f.backward(x, w, tables.first, tables.second, saved.second, dy, true); };
  };
  row("qk_norm_rope forward " + shape, gigabytes(dy, 2), "GB/s", run("cpu", false),
      run("reference", false), "reference");
  row("qk_norm_rope backward " + shape, gigabytes(dy, 3), "GB/s", run("cpu", true),
      run("reference", true), "reference");
}

void elementwise(c10::ScalarType dtype, std::int64_t tokens, std::int64_t width) {
  const std::string shape = fmt::format("[{},{}] {}", tokens, width, c10::toString(dtype));
  const auto gate = randn({tokens, width}, dtype), up = randn({tokens, width}, dtype),
             dy = randn({tokens, width}, dtype);
  const auto glu = [&](const char* name, bool back) -> Work {
    const auto f = table<Swiglu>(name, dtype).get<Swiglu>();
    if (!back) return [=] { f.forward(gate, up); };
    return [=] { f.backward(gate, up, dy); };
  };
  row("swiglu forward " + shape, gigabytes(gate, 3), "GB/s", glu("cpu", false),
      glu("reference", false), "reference");
  row("swiglu backward " + shape, gigabytes(gate, 5), "GB/s", glu("cpu", true),
      glu("reference", true), "reference");
  const auto x3 = gate.view({tokens, -1, 64}), dy3 = dy.view({tokens, -1, 64});
  const auto gate3 = randn({tokens, width / 64, 128}, dtype).narrow(2, 64, 64);
  const auto gated = [&](const char* name, bool back) -> Work {
    const auto f = table<OutputGate>(name, dtype).get<OutputGate>();
    if (!back) return [=] { f.forward(x3, gate3); };
    return [=] { f.backward(x3, gate3, dy3); };
  };
  row("output_gate forward " + shape, gigabytes(gate, 3), "GB/s", gated("cpu", false),
      gated("reference", false), "reference");
  row("output_gate backward " + shape, gigabytes(gate, 5), "GB/s", gated("cpu", true),
      gated("reference", true), "reference");
}

void attention_rows(c10::ScalarType dtype, std::int64_t count, std::int64_t length,
                    std::int64_t heads, std::int64_t kv_heads, std::int64_t dim) {
  const std::string shape =
      fmt::format("{}x{} {}/{}x{} {}", count, length, heads, kv_heads, dim, c10::toString(dtype));
  const std::int64_t tokens = count * length;
  std::vector<std::int32_t> boundaries;
  for (std::int64_t s = 0; s <= count; ++s) {
    boundaries.push_back(static_cast<std::int32_t>(s * length));
  }
  const auto sequences = Sequences::from_host(boundaries, c10::Device(c10::DeviceType::CPU));
  const Attention::Inputs in{randn({tokens, heads, dim}, dtype),
                             randn({tokens, kv_heads, dim}, dtype),
                             randn({tokens, kv_heads, dim}, dtype),
                             sequences,
                             sequences,
                             0};
  const auto d_o = randn({tokens, heads, dim}, dtype);
  // Two products over half of the pairs.
  const double forward_gflop =
      2.0 * static_cast<double>(count * heads * length * length * dim) * 1e-9;
  const auto run = [&](const char* name, bool back) -> Work {
    const auto f = table<Attention>(name, dtype).get<Attention>();
    const auto saved = f.forward(in, true);
    if (!back) return [=] { f.forward(in, true); };
    return [=] { f.backward(in, saved, d_o); };
  };
  // libtorch's own flash kernel on the same data, laid out as it wants it, heads repeated.
  const auto batched = [&](const at::Tensor& x) {
    return x.view({count, length, x.size(1), dim})
        .repeat_interleave(heads / x.size(1), 2)
        .transpose(1, 2);
  };
  const auto q = batched(in.q), k = batched(in.k), v = batched(in.v), d = batched(d_o);
  const auto result = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, true);
  const Work aten = [=] { at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, true); };
  const Work aten_back = [=] {
    at::_scaled_dot_product_flash_attention_for_cpu_backward(d, q, k, v, std::get<0>(result),
                                                             std::get<1>(result), 0.0, true);
  };
  row("attention forward " + shape, forward_gflop, "GFLOP/s", run("cpu", false), aten,
      "aten flash");
  row("attention backward " + shape, 2.5 * forward_gflop, "GFLOP/s", run("cpu", true), aten_back,
      "aten flash");
  row("attention forward " + shape, forward_gflop, "GFLOP/s", run("cpu", false),
      run("reference", false), "reference");
  row("attention backward " + shape, 2.5 * forward_gflop, "GFLOP/s", run("cpu", true),
      run("reference", true), "reference");
}

void decode(c10::ScalarType dtype, std::int64_t batch, std::int64_t length) {
  const auto q = randn({batch, 4, 128}, dtype), k = randn({batch, length, 2, 128}, dtype),
             v = randn({batch, length, 2, 128}, dtype);
  const auto fresh = randn({batch, 2, 128}, dtype);
  std::vector<std::int64_t> slots, lengths(static_cast<std::size_t>(batch), length - 1);
  std::vector<std::vector<std::int32_t>> pages;
  for (std::int64_t b = 0; b < batch; ++b) {
    slots.push_back(b);
    pages.push_back({static_cast<std::int32_t>(b)});
  }
  const auto run = [&](const char* name) -> Work {
    const auto f = table<AttentionDecode>(name, dtype).get<AttentionDecode>();
    const CacheRows rows = CacheRows::from_host(slots, lengths, pages, at::kCPU);
    return [=] { f.forward({q, fresh, fresh, k, v, 0.1}, rows); };
  };
  row(fmt::format("attention decode {} x {} keys {}", batch, length, c10::toString(dtype)),
      gigabytes(k, 2), "GB/s", run("cpu"), run("reference"), "reference");
}

void cross_entropy(c10::ScalarType dtype, std::int64_t rows, std::int64_t hidden,
                   std::int64_t vocab) {
  LinearCrossEntropy::Inputs in;
  in.hidden = randn({rows, hidden}, dtype);
  in.weight = randn({vocab, hidden}, dtype) * 0.05;
  in.labels = at::randint(vocab, {rows}, at::TensorOptions().dtype(at::kLong));
  const auto run = [&](const char* name) -> Work {
    const auto f = table<LinearCrossEntropy>(name, dtype).get<LinearCrossEntropy>();
    return [=] {
      at::Tensor buffer;
      f.forward(in, true, true, buffer);
    };
  };
  const std::string shape =
      fmt::format("{} x {} x {} {}", rows, hidden, vocab, c10::toString(dtype));
  const double gflop = 6e-9 * static_cast<double>(rows * hidden * vocab);
  row("linear_cross_entropy " + shape, gflop, "GFLOP/s", run("cpu"), run("reference"), "reference");
  const auto h = in.hidden.to(at::kFloat), w = in.weight.to(at::kFloat);
  const auto logits = at::mm(h, w.t());
  const Work products = [=] {
    at::mm(h, w.t());
    at::mm(logits, w);
    at::mm(logits.t(), h);
  };
  row("linear_cross_entropy " + shape, gflop, "GFLOP/s", run("cpu"), products, "3 products");
}

void experts(c10::ScalarType dtype, std::int64_t tokens, std::int64_t hidden, std::int64_t width,
             std::int64_t count, std::int64_t k) {
  const MoeRouting routing = moe_route(at::randn({tokens, count}), k, true);
  const MoeExperts::Inputs in{randn({tokens, hidden}, dtype), routing.weights.to(dtype),
                              routing.experts, randn({count, 2 * width, hidden}, dtype),
                              randn({count, hidden, width}, dtype)};
  const auto dy = randn({tokens, hidden}, dtype);
  const auto run = [&](const char* name, bool back) -> Work {
    const auto f = table<MoeExperts>(name, dtype).get<MoeExperts>();
    const auto saved = f.forward(in, true);
    if (!back) return [=] { f.forward(in, true); };
    return [=] { f.backward(in, saved, dy, true, {}); };
  };
  const std::string shape = fmt::format("{} tokens {} of {} x {}x{} {}", tokens, k, count, hidden,
                                        width, c10::toString(dtype));
  const double gflop = 6e-9 * static_cast<double>(tokens * k * hidden * width);
  row("moe forward " + shape, gflop, "GFLOP/s", run("cpu", false), run("reference", false),
      "reference");
  row("moe backward " + shape, 2 * gflop, "GFLOP/s", run("cpu", true), run("reference", true),
      "reference");
}

void optimizer(c10::ScalarType dtype, int layers, std::int64_t hidden) {
  std::vector<AdamwTensor> tensors;
  double bytes = 0;
  const auto state = at::TensorOptions().dtype(at::kFloat);
  const auto add = [&](at::IntArrayRef sizes) {
    AdamwTensor t;
    t.parameter = randn(sizes, dtype);
    t.gradient = randn(sizes, dtype);
    t.exp_avg = at::zeros(sizes, state);
    t.exp_avg_sq = at::zeros(sizes, state);
    if (dtype == at::kBFloat16) t.master = t.parameter.to(at::kFloat);
    t.weight_decay = 0.1;
    // Moments and value are read and written, the gradient read, the rounded parameter written.
    bytes += static_cast<double>(t.parameter.numel()) * (dtype == at::kBFloat16 ? 28 : 28);
    tensors.push_back(t);
  };
  for (int i = 0; i < layers; ++i) {
    for (int j = 0; j < 10; ++j) add({hidden});
    for (int j = 0; j < 3; ++j) add({3 * hidden, hidden});
    for (int j = 0; j < 4; ++j) add({hidden, hidden});
  }
  AdamwOptions options;
  options.lr = 1e-4;
  const auto run = [&](const char* name) -> Work {
    const auto f = table<AdamwStep>(name, dtype).get<AdamwStep>();
    return [=] { f.step(tensors, options); };
  };
  const std::string shape =
      fmt::format("{} tensors of hidden {} {}", tensors.size(), hidden, c10::toString(dtype));
  row("adamw " + shape, bytes * 1e-9, "GB/s", run("cpu"), run("reference"), "reference");
  std::vector<at::Tensor> gradients;
  for (const AdamwTensor& t : tensors) gradients.push_back(t.gradient);
  row(
      "gradient_norm " + shape, bytes / 7e9, "GB/s", [&] { gradient_norm(gradients); },
      [&] {
        double total = 0;
        for (const at::Tensor& g : gradients) {
          total += (g.to(at::kDouble) * g.to(at::kDouble)).sum().item().toDouble();
        }
      },
      "composite");
}

void run_all() {
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    norms(dtype, 2048, 256);
    norms(dtype, 2048, 512);
    rope(dtype, 2048, 4, 64);
    rope(dtype, 2048, 4, 128);
    elementwise(dtype, 2048, 768);
    elementwise(dtype, 2048, 1536);
    attention_rows(dtype, 4, 512, 4, 2, 64);
    attention_rows(dtype, 2, 1024, 4, 2, 128);
    decode(dtype, 1, 512);
    decode(dtype, 16, 512);
    cross_entropy(dtype, 2048, 256, 4096);
    cross_entropy(dtype, 2048, 512, 8192);
    experts(dtype, 2048, 256, 128, 32, 4);
    optimizer(dtype, 8, 256);
    optimizer(dtype, 12, 512);
  }
}

}  // namespace
}  // namespace heddle::ops

int main(int argc, char** argv) {
  if (argc > 1) heddle::ops::turns = std::atoi(argv[1]);
  if (argc > 2) heddle::ops::filter = argv[2];
  fmt::print("{} threads\n", at::get_num_threads());
  heddle::ops::run_all();
  return 0;
}
