// Times the fused CUDA kernels alone and compares each with the bytes it must move:
//   heddle_fused_bench [tokens]
// Prints time, bytes (each input read once, each output written once), bandwidth, and the fraction
// of what an H200 reaches in such kernels (3.7 TB/s).
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/causal_conv1d/cuda/causal_conv1d.h"
#include "ops/cuda/gated_product.h"
#include "ops/gated_delta_net/cuda/gated_rms_norm.h"
#include "ops/gated_delta_net/cuda/gates.h"
#include "ops/linear_cross_entropy/cuda/softmax_gradient.h"
#include "ops/optimizer_step/cuda/adamw.h"
#include "ops/rms_norm/cuda/rms_norm.h"
#include "ops/rotary/cuda/qk_norm_rope.h"
#include "random_matrix.cuh"

namespace {

using namespace heddle::ops::cuda;
using heddle::bench_cuda::check;
using heddle::bench_cuda::fill;

constexpr double kBandwidth = 3.7e12;
constexpr Element kType = Element::kBFloat16;

__global__ void fill_float(float* data, int64_t count, unsigned seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    unsigned h = static_cast<unsigned>(i) * 2654435761u + seed;
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
    data[i] = static_cast<float>(h & 0xffff) / 32768.f - 1.f;
  }
}

/// Device memory filled with random values; freed with the pool.
class Pool {
 public:
  ~Pool() {
    for (void* p : all_) cudaFree(p);
  }
  void* half(int64_t count) {
    void* p = raw(count * 2);
    fill<<<1024, 256>>>(static_cast<__nv_bfloat16*>(p), count, next_++, 1);
    return p;
  }
  float* single(int64_t count) {
    auto* p = static_cast<float*>(raw(count * 4));
    fill_float<<<1024, 256>>>(p, count, next_++);
    return p;
  }
  void* raw(int64_t bytes) {
    void* p = nullptr;
    check(cudaMalloc(&p, static_cast<size_t>(std::max<int64_t>(bytes, 16))));
    all_.push_back(p);
    return p;
  }

 private:
  std::vector<void*> all_;
  unsigned next_ = 1;
};

InputRows in(const void* data, int64_t outer, int64_t inner = 0) { return {data, outer, inner}; }
OutputRows out(void* data, int64_t outer, int64_t inner = 0) { return {data, outer, inner}; }

/// Median of seven trials of ten calls, in seconds.
double seconds(const std::function<void()>& call) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  for (int i = 0; i < 3; ++i) call();
  std::vector<float> trials;
  for (int trial = 0; trial < 7; ++trial) {
    check(cudaEventRecord(begin));
    for (int i = 0; i < 10; ++i) call();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    trials.push_back(ms / 10);
  }
  std::sort(trials.begin(), trials.end());
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  return trials[trials.size() / 2] * 1e-3;
}

void report(const std::string& name, double bytes, const std::function<void()>& call) {
  const double time = seconds(call);
  std::printf("  %-34s %8.3f ms %8.1f MB %6.2f TB/s  %5.2f of 3.7 TB/s\n", name.c_str(), time * 1e3,
              bytes * 1e-6, bytes / time * 1e-12, bytes / time / kBandwidth);
  std::fflush(stdout);
}

struct Model {
  const char* name;
  int64_t hidden, ffn, value_heads, conv_channels, q_heads, kv_heads;
};

void norms(const Model& m, int64_t T) {
  Pool pool;
  const double n = static_cast<double>(T * m.hidden);
  const RmsNormShape shape{kType, kType, T, m.hidden};
  void *x = pool.half(T * m.hidden), *residual = pool.half(T * m.hidden), *w = pool.half(m.hidden),
       *y = pool.half(T * m.hidden), *y_2 = pool.half(T * m.hidden), *sum = pool.half(T * m.hidden);
  float* rstd = pool.single(T);
  float* workspace = pool.single(rms_norm_backward_workspace(shape));
  report("rms_norm forward", 4 * n, [&] {
    rms_norm_forward(shape, in(x, m.hidden), {}, w, 1e-6f, y, nullptr, rstd, nullptr);
  });
  report("add_rms_norm forward", 8 * n, [&] {
    rms_norm_forward(shape, in(x, m.hidden), in(residual, m.hidden), w, 1e-6f, y, sum, rstd,
                     nullptr);
  });
  report("rms_norm backward", 6 * n, [&] {
    rms_norm_backward(shape, in(x, m.hidden), w, rstd, {in(y, m.hidden), {}, {}}, sum, w, nullptr,
                      workspace, nullptr);
  });
  report("add_rms_norm backward", 8 * n, [&] {
    rms_norm_backward(shape, in(x, m.hidden), w, rstd,
                      {in(y, m.hidden), {}, in(residual, m.hidden)}, sum, w, nullptr, workspace,
                      nullptr);
  });
  report("the same, weight frozen", 8 * n, [&] {
    rms_norm_backward(shape, in(x, m.hidden), w, rstd,
                      {in(y, m.hidden), {}, in(residual, m.hidden)}, sum, nullptr, nullptr, nullptr,
                      nullptr);
  });
  report("the same of two readers", 10 * n, [&] {
    rms_norm_backward(shape, in(x, m.hidden), w, rstd,
                      {in(y, m.hidden), in(y_2, m.hidden), in(residual, m.hidden)}, sum, nullptr,
                      nullptr, nullptr, nullptr);
  });
  report("add_rms_norm backward with y again", 10 * n, [&] {
    rms_norm_backward(shape, in(x, m.hidden), w, rstd,
                      {in(y, m.hidden), {}, in(residual, m.hidden)}, sum, w, residual, workspace,
                      nullptr);
  });
}

void gated_delta_net(const Model& m, int64_t T) {
  Pool pool;
  const int64_t H = m.value_heads, D = 128;
  const double n = static_cast<double>(T * H * D);
  const GatedRmsNormShape shape{kType, kType, T, H, D};
  void *x = pool.half(T * H * D), *z = pool.half(T * H * D), *w = pool.half(D),
       *y = pool.half(T * H * D), *dx = pool.half(T * H * D), *dz = pool.half(T * H * D),
       *again = pool.half(T * H * D);
  float *rstd = pool.single(T * H),
        *workspace = pool.single(gated_rms_norm_backward_workspace(shape));
  report("gated_rms_norm forward", 6 * n, [&] {
    gated_rms_norm_forward(shape, in(x, H * D, D), in(z, H * D, D), w, 1e-6f, y, rstd, nullptr);
  });
  report("gated_rms_norm backward", 10 * n, [&] {
    gated_rms_norm_backward(shape, in(x, H * D, D), in(z, H * D, D), w, rstd, in(y, H * D, D), dx,
                            dz, w, nullptr, workspace, nullptr);
  });
  report("the same with y again, weight frozen", 12 * n, [&] {
    gated_rms_norm_backward(shape, in(x, H * D, D), in(z, H * D, D), w, rstd, in(y, H * D, D), dx,
                            dz, nullptr, again, nullptr, nullptr);
  });
}

/// `where`: what its data does.
void gates(const Model& m, int64_t T, const char* where) {
  Pool pool;
  const int64_t H = m.value_heads;
  const double n = static_cast<double>(T * H);
  const GdnGatesShape shape{kType, kType, kType, T, H};
  void *a = pool.half(T * H), *b = pool.half(T * H), *a_log = pool.half(H), *bias = pool.half(H),
       *da = pool.half(T * H), *db = pool.half(T * H);
  float *g = pool.single(T * H), *beta = pool.single(T * H), *dg = pool.single(T * H),
        *d_beta = pool.single(T * H), *scratch = pool.single(gdn_gates_backward_workspace(shape));
  report(std::string("gdn_gates forward, ") + where, 12 * n,
         [&] { gdn_gates_forward(shape, in(a, H), in(b, H), a_log, bias, g, beta, nullptr); });
  report(std::string("gdn_gates backward, ") + where, 24 * n, [&] {
    gdn_gates_backward(shape, in(a, H), a_log, bias, g, beta, dg, d_beta, da, db, a_log, bias,
                       scratch, nullptr);
  });
}

void convolution(const Model& m, int64_t T) {
  Pool pool;
  const int64_t C = m.conv_channels, S = 8;
  const double n = static_cast<double>(T * C);
  const CausalConv1dShape shape{kType, kType, T, C, 4, S};
  std::vector<int> ends;
  for (int64_t s = 0; s <= S; ++s) ends.push_back(static_cast<int>(T * s / S));
  auto* cu_seqlens = static_cast<int*>(pool.raw((S + 1) * 4));
  check(cudaMemcpy(cu_seqlens, ends.data(), ends.size() * 4, cudaMemcpyHostToDevice));
  void *x = pool.half(T * C), *w = pool.half(C * 4), *y = pool.half(T * C), *dx = pool.half(T * C);
  float* workspace = pool.single(causal_conv1d_backward_workspace(shape));
  const CausalConv1dInputs inputs{in(x, C), w, cu_seqlens, nullptr};
  report("causal_conv1d + silu forward", 4 * n,
         [&] { causal_conv1d_forward(shape, inputs, y, nullptr, nullptr); });
  report("causal_conv1d + silu backward", 6 * n, [&] {
    causal_conv1d_backward(shape, inputs, in(y, C), nullptr, dx, w, nullptr, workspace, nullptr);
  });
  report("the same, taps frozen", 6 * n, [&] {
    causal_conv1d_backward(shape, inputs, in(y, C), nullptr, dx, nullptr, nullptr, nullptr,
                           nullptr);
  });
}

void attention(const Model& m, int64_t T) {
  Pool pool;
  const int64_t D = 256, half = 32;
  float *cos = pool.single(T * half), *sin = pool.single(T * half);
  void* w = pool.half(D);
  for (const bool query : {true, false}) {
    const int64_t H = query ? m.q_heads : m.kv_heads;
    const double n = static_cast<double>(T * H * D), tables = static_cast<double>(T * half * 8);
    // The query lies in a projection beside its gate.
    const int64_t stride = query ? 2 * D : D;
    const QkNormRopeShape shape{kType, kType, T, H, D, half};
    void *x = pool.half(T * H * stride), *y = pool.half(T * H * D), *dx = pool.half(T * H * D);
    float *rstd = pool.single(T * H),
          *workspace = pool.single(qk_norm_rope_backward_workspace(shape));
    const std::string name = query ? "q" : "k";
    report(name + "_norm_rope forward", 4 * n + tables, [&] {
      qk_norm_rope_forward(shape, in(x, H * stride, stride), w, cos, sin, 1e-6f, y, rstd, nullptr);
    });
    report(name + "_norm_rope backward", 6 * n + tables, [&] {
      qk_norm_rope_backward(shape, in(x, H * stride, stride), w, cos, sin, rstd, in(y, H * D, D),
                            out(dx, H * D, D), w, workspace, nullptr);
    });
  }
  const int64_t H = m.q_heads;
  const double n = static_cast<double>(T * H * D);
  const GatedProductShape shape{GateActivation::kSigmoid, kType, T, H, D};
  void *q_gate = pool.half(T * H * 2 * D), *x = pool.half(T * H * D), *y = pool.half(T * H * D),
       *dx = pool.half(T * H * D), *dg = pool.half(T * H * D);
  const InputRows gate = in(static_cast<__nv_bfloat16*>(q_gate) + D, H * 2 * D, 2 * D);
  report("output_gate forward", 6 * n,
         [&] { gated_product_forward(shape, in(x, H * D, D), gate, out(y, H * D, D), nullptr); });
  report("output_gate backward", 10 * n, [&] {
    gated_product_backward(shape, in(x, H * D, D), gate, in(y, H * D, D), out(dx, H * D, D),
                           out(dg, H * D, D), {}, nullptr);
  });
}

void feed_forward(const Model& m, int64_t T) {
  Pool pool;
  const int64_t F = m.ffn;
  const double n = static_cast<double>(T * F);
  const GatedProductShape shape{GateActivation::kSilu, kType, T, 1, F};
  void *gate = pool.half(T * F), *up = pool.half(T * F), *y = pool.half(T * F),
       *dg = pool.half(T * F), *du = pool.half(T * F);
  report("swiglu forward", 6 * n,
         [&] { gated_product_forward(shape, in(up, F), in(gate, F), out(y, F), nullptr); });
  report("swiglu backward", 10 * n, [&] {
    gated_product_backward(shape, in(up, F), in(gate, F), in(y, F), out(du, F), out(dg, F), {},
                           nullptr);
  });
  void* again = pool.half(T * F);
  report("the same with y again", 12 * n, [&] {
    gated_product_backward(shape, in(up, F), in(gate, F), in(y, F), out(du, F), out(dg, F),
                           out(again, F), nullptr);
  });
}

void head() {
  Pool pool;
  const int64_t rows = 4096, V = 248320;
  const double n = static_cast<double>(rows * V);
  void* logits = pool.half(rows * V);
  auto* labels = static_cast<int64_t*>(pool.raw(rows * 8));
  check(cudaMemset(labels, 0, static_cast<size_t>(rows) * 8));
  SoftmaxGradientRows parameters;
  parameters.labels = labels;
  parameters.logprobs = pool.single(rows), parameters.entropies = pool.single(rows);
  const SoftmaxGradientShape shape{kType, rows, V};
  std::printf("head, 4096 rows of 248320 logits\n");
  report("log-probabilities and entropies", 2 * n,
         [&] { softmax_gradient(shape, logits, parameters, nullptr); });
  parameters.want_gradient = true;
  report("softmax gradient", 4 * n, [&] { softmax_gradient(shape, logits, parameters, nullptr); });
}

void optimizer() {
  Pool pool;
  const int64_t tensors = 300, count = 1000003;
  std::vector<AdamwEntry> entries;
  for (int64_t i = 0; i < tensors; ++i) {
    AdamwEntry entry;
    entry.weight = pool.single(count), entry.rounded = pool.half(count);
    entry.gradient = pool.single(count);
    entry.exp_avg = pool.single(count), entry.exp_avg_sq = pool.single(count);
    // Squares are not negative.
    check(cudaMemset(entry.exp_avg_sq, 0, static_cast<size_t>(count) * 4));
    entry.count = count;
    entries.push_back(entry);
  }
  const AdamwScalars scalars{0.9f, 0.95f, 1e-8f, {.lr = 1e-4, .step_size = 1e-4}, nullptr};
  std::printf("optimizer, 300 tensors of a million elements, fp32 gradients, bf16 weights\n");
  report("adamw", 30. * static_cast<double>(tensors * count),
         [&] { adamw(entries, scalars, nullptr); });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int64_t T = argc > 1 ? std::atoll(argv[1]) : 32768;
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0));
    std::printf("%s, %lld tokens, bf16; median of 7 trials of 10 calls\n", device.name,
                static_cast<long long>(T));
    for (const Model& m :
         {Model{"0.8B", 1024, 3584, 16, 6144, 8, 2}, Model{"4B", 2560, 9216, 32, 8192, 16, 4}}) {
      std::printf("%s\n", m.name);
      norms(m, T);
      gated_delta_net(m, T);
      // So little that it stays in the second-level cache; then as much as shows the bandwidth.
      gates(m, T, "in L2");
      gates(m, 32 * T, "32 x tokens");
      convolution(m, T);
      attention(m, T);
      feed_forward(m, T);
    }
    head();
    optimizer();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "heddle_fused_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
