#include "ops/gated_delta_net/cpu/vector/chunk.h"

namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH {
namespace {

template <class X>
void step(const RuleArgs& a, long row, long head, void* state) {
  using T = Compute<X>;
  constexpr int W = kLanes<T>;
  constexpr long kMaxRow = 1024;
  alignas(64) T q[kMaxRow], k[kMaxRow];
  const long K = a.K, V = a.V, key_head = head / (a.Hv / a.Hk);
  T* S = static_cast<T*>(state);
  const auto unit = [&](T* to, const void* from, long stride, T factor) {
    copy(to, static_cast<const X*>(from) + row * stride + key_head * K, K);
    if (a.normalize) factor = factor / root(dot(to, to, K) + T(kNormEps));
    for (long j = 0; j < K; j += W) store(to + j, factor * load(to + j));
  };
  unit(q, a.q, a.q_stride, T(a.scale));
  unit(k, a.k, a.k_stride, T(1));
  T g[W] = {};
  g[0] = static_cast<const T*>(a.g)[row * a.Hv + head];
  const T gamma = simd::exp<T>(load(g))[0];
  const T beta = static_cast<const T*>(a.beta)[row * a.Hv + head];
  const T kq = dot(k, q, K);
  const X* v = static_cast<const X*>(a.v) + row * a.v_stride + head * V;
  X* o = static_cast<X*>(a.o) + (row * a.Hv + head) * V;
  // S^T k and S^T q in one reading; o = gamma S^T q + (k.q) u needs no second one.
  const auto columns = [&](auto count, long j) {
    constexpr int N = sizeof(count);
    Vec<T> Sk[N], Sq[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) Sk[n] = Sq[n] = Vec<T>{};
    for (long i = 0; i < K; ++i) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const Vec<T> s = load(S + i * V + j + n * W);
        Sk[n] += k[i] * s;
        Sq[n] += q[i] * s;
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      Sk[n] = beta * (load(v + j + n * W) - gamma * Sk[n]);
      store(o + j + n * W, gamma * Sq[n] + kq * Sk[n]);
    }
    for (long i = 0; i < K; ++i) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        T* s = S + i * V + j + n * W;
        store(s, gamma * load(s) + k[i] * Sk[n]);
      }
    }
  };
  struct Four {
    char size[4];
  };
  long j = 0;
  for (; j + 4 * W <= V; j += 4 * W) columns(Four{}, j);
  for (; j < V; j += W) columns(char{}, j);
}

}  // namespace

void fill_step(RuleKernels& kernels) {
  kernels.step[0] = step<float>;
  kernels.step[1] = step<simd::BFloat16>;
  kernels.step[2] = step<double>;
}

const RuleKernels& rule_kernels() {
  static const RuleKernels kernels = [] {
    RuleKernels table{};
    fill_forward(table);
    fill_backward(table);
    fill_step(table);
    return table;
  }();
  return kernels;
}

}  // namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH
