#include "ops/gated_delta_net/cpu/vector/chunk.h"

namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH {
namespace {

using simd::BFloat16;

HEDDLE_INLINE void read(const float* from, Vec<float>& v) { v = load(from); }
HEDDLE_INLINE void read(const double* from, Vec<double>& v) { v = load(from); }
HEDDLE_INLINE void read(const BFloat16* from, Vec<float>& v) { v = load(from); }
HEDDLE_INLINE void read(const BFloat16* from, Vec<double>& v) {
  for (int i = 0; i < kLanes<double>; ++i) v[i] = simd::scalar(from[i]);
}
HEDDLE_INLINE void write(float* to, Vec<float> v) { store(to, v); }
HEDDLE_INLINE void write(double* to, Vec<double> v) { store(to, v); }
HEDDLE_INLINE void write(BFloat16* to, Vec<float> v) { store(to, v); }
HEDDLE_INLINE void write(BFloat16* to, Vec<double> v) {
  for (int i = 0; i < kLanes<double>; ++i) simd::assign(to + i, static_cast<float>(v[i]));
}

/// States lie in memory as values of `State`.
template <class X, class State>
void step(const RuleArgs& a, long row, long head, void* state) {
  using T = Compute<X>;
  constexpr int W = kLanes<T>;
  constexpr long kMaxRow = 1024;
  alignas(64) T q[kMaxRow], k[kMaxRow];
  const long K = a.K, V = a.V, key_head = head / (a.Hv / a.Hk);
  State* S = static_cast<State*>(state);
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
        Vec<T> s;
        read(S + i * V + j + n * W, s);
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
        State* const place = S + i * V + j + n * W;
        Vec<T> s;
        read(place, s);
        write(place, gamma * s + k[i] * Sk[n]);
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
  kernels.step[0][0] = step<float, float>;
  kernels.step[0][1] = step<float, BFloat16>;
  kernels.step[1][0] = step<BFloat16, float>;
  kernels.step[1][1] = step<BFloat16, BFloat16>;
  kernels.step[2][0] = step<double, double>;
  kernels.step[2][1] = step<double, BFloat16>;
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
