#pragma once

#include "ops/gated_delta_net/cpu/rule_kernels.h"
#include "ops/gated_delta_net/cpu/vector/product.h"

// One chunk of the chunked gated delta rule: what its forward and its backward share. Notation and
// identities: docs/gdn.md; here q is normalised and scaled, e = u / beta is kept instead of u (so
// that d beta needs no division), and the triangular system is solved by substitution instead of
// forming its inverse.
//
// Matrices of token rows ([chunk][K], [chunk][V]) have features in their lanes; those marked T are
// transposed and have tokens in their lanes, as have dqT and dkT: products with S^T then need no
// transposed state.
namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH {

/// Each source of vector/ fills its part of the table.
void fill_forward(RuleKernels& kernels);
void fill_backward(RuleKernels& kernels);
void fill_step(RuleKernels& kernels);

using simd::Compute;

/// Tokens of a chunk, a multiple of 16 that divides kSegment; 32 is 5 to 15 % slower.
constexpr long C = 16;
constexpr long kChunks = kSegment / C;
constexpr double kNormEps = 1e-6;
/// States are this much wider than V: rows a power of two apart would share few cache sets.
constexpr long kPad = 16;

/// Hands out aligned pieces of the unit's scratch; with a null base it only counts.
struct Arena {
  char* base;
  unsigned long used = 0;

  template <class T>
  T* take(long count) {
    T* piece = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
    used += (static_cast<unsigned long>(count) * sizeof(T) + 127) / 128 * 128;
    return piece;
  }
};

template <class T>
HEDDLE_INLINE void zero(T* p, long count) {
  for (long i = 0; i < count; i += kLanes<T>) store(p + i, Vec<T>{});
}
template <class X, class T>
HEDDLE_INLINE void copy(X* to, const T* from, long count) {
  for (long i = 0; i < count; i += kLanes<Compute<T>>) store(to + i, load(from + i));
}
template <class T>
HEDDLE_INLINE T dot(const T* a, const T* b, long count) {
  Vec<T> total{};
  for (long i = 0; i < count; i += kLanes<T>) total += load(a + i) * load(b + i);
  return simd::sum<T>(total);
}
template <class T>
HEDDLE_INLINE void copy_state(T* to, long to_stride, const T* from, long from_stride, long K,
                              long V) {
  for (long i = 0; i < K; ++i) copy(to + i * to_stride, from + i * from_stride, V);
}

HEDDLE_INLINE float root(float x) { return __builtin_sqrtf(x); }
HEDDLE_INLINE double root(double x) { return __builtin_sqrt(x); }

/// Rows [0, n) of a strided matrix into [C][D], zero beyond: what lies there belongs to others.
template <class T, class X>
HEDDLE_INLINE void load_rows(T* to, const X* from, long stride, long n, long D) {
  for (long i = 0; i < n; ++i) copy(to + i * D, from + i * stride, D);
  zero(to + n * D, (C - n) * D);
}

/// Values that the value heads of a key head share in one segment, per chunk.
template <class T>
struct Shared {
  T* qk_rows;  // [2C][K]: C rows of q, then C of k
  T* qkT;      // [K][2C]: the same transposed
  T *qk, *kk;  // [C][C] q_i.k_j, k_i.k_j
  T *rq, *rk;  // [C] factors that made unit rows
};

template <class T>
void take_shared(Arena& arena, Shared<T>* shared, long K) {
  for (long c = 0; c < kChunks; ++c) {
    shared[c].qk_rows = arena.take<T>(2 * C * K);
    shared[c].qkT = arena.take<T>(2 * K * C);
    shared[c].qk = arena.take<T>(C * C);
    shared[c].kk = arena.take<T>(C * C);
    shared[c].rq = arena.take<T>(C);
    shared[c].rk = arena.take<T>(C);
  }
}

template <class T, class X>
HEDDLE_INLINE void unit_rows(T* rows, T* r, const X* from, long stride, long n, long K, T factor,
                             bool normalize) {
  load_rows(rows, from, stride, n, K);
  for (long i = 0; i < C; ++i) {
    r[i] = normalize ? T(1) / root(dot(rows + i * K, rows + i * K, K) + T(kNormEps)) : T(1);
    const T f = r[i] * factor;
    for (long j = 0; j < K; j += kLanes<T>) store(rows + i * K + j, f * load(rows + i * K + j));
  }
}

template <class X, class T>
void prepare(const RuleArgs& a, const RuleUnit& unit, long token, long n, const Shared<T>& s) {
  const long K = a.K;
  T *q = s.qk_rows, *k = s.qk_rows + C * K;
  unit_rows(q, s.rq, static_cast<const X*>(a.q) + token * a.q_stride + unit.key_head * K,
            a.q_stride, n, K, T(a.scale), a.normalize);
  unit_rows(k, s.rk, static_cast<const X*>(a.k) + token * a.k_stride + unit.key_head * K,
            a.k_stride, n, K, T(1), a.normalize);
  simd::transpose(s.qkT, 2 * C, s.qk_rows, K, 2 * C, K);
  product(
      2 * C, C, K, Columns<T>{s.qkT, 2 * C}, s.qkT + C, 2 * C, Zero<T>{},
      [&](long i, long j, Vec<T> v) { store((i < C ? s.qk + i * C : s.kk + (i - C) * C) + j, v); });
}

/// The decays of one chunk of one value head.
template <class T>
struct Gates {
  T beta[C], grow[C], tail[C];  // beta, e^G, e^(G_C - G); beta is 0 in padded rows
  T decay[C * C];               // e^(G_i - G_j) for i >= j, else 0
  T M[C * C];                   // decay * k_i.k_j for i > j, else 0
  T P[C * C];                   // decay * q_i.k_j
  T chunk;                      // e^G_C
};

template <class T>
void fill_gates(const RuleArgs& a, long head, long token, long n, const Shared<T>& s, Gates<T>& x) {
  const T* g = static_cast<const T*>(a.g) + token * a.Hv + head;
  const T* beta = static_cast<const T*>(a.beta) + token * a.Hv + head;
  // In double, so that a strong decay early in the chunk does not blur the weak ones after it.
  double G[C];
  double total = 0;
  for (long i = 0; i < C; ++i) {
    if (i < n) total += static_cast<double>(g[i * a.Hv]);
    G[i] = total;
    x.beta[i] = i < n ? beta[i * a.Hv] : T(0);
  }
  for (long i = 0; i < C; ++i) {
    x.grow[i] = static_cast<T>(G[i]);
    x.tail[i] = static_cast<T>(total - G[i]);
  }
  for (long i = 0; i < C; ++i) {
    for (long j = 0; j < C; ++j) {
      x.decay[i * C + j] = j <= i ? static_cast<T>(G[i] - G[j]) : T(-1e30);
    }
  }
  constexpr int W = kLanes<T>;
  for (long i = 0; i < C; i += W) {
    store(x.grow + i, simd::exp<T>(load(x.grow + i)));
    store(x.tail + i, simd::exp<T>(load(x.tail + i)));
  }
  for (long i = 0; i < C * C; i += W) {
    const Vec<T> decay = simd::exp<T>(load(x.decay + i));
    store(x.decay + i, decay);
    store(x.M + i, decay * load(s.kk + i));
    store(x.P + i, decay * load(s.qk + i));
  }
  for (long i = 0; i < C; ++i) x.M[i * C + i] = 0;
  x.chunk = x.grow[C - 1];
}

/// Rows w [C][V] become e: e_i = w_i - sum_{j<i} M_ij u_j, u_i = beta_i e_i.
template <class T>
void solve(const Gates<T>& x, T* e, T* u, long V) {
  constexpr int W = kLanes<T>;
  const auto columns = [&](auto count, long v) {
    constexpr int N = sizeof(count);
    for (long i = 0; i < C; ++i) {
      Vec<T> sums[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[n] = load(e + i * V + v + n * W);
      for (long j = 0; j < i; ++j) {
        const T m = x.M[i * C + j];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[n] -= m * load(u + j * V + v + n * W);
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        store(e + i * V + v + n * W, sums[n]);
        store(u + i * V + v + n * W, x.beta[i] * sums[n]);
      }
    }
  };
  struct Four {
    char size[4];
  };
  long v = 0;
  for (; v + 4 * W <= V; v += 4 * W) columns(Four{}, v);
  for (; v < V; v += W) columns(char{}, v);
}

/// Rows dU [C][V] become dWh, the gradient of W diag(beta): dWh_j = dU_j - sum_{i>j} M_ij dv_i,
/// dv_j = beta_j dWh_j.
template <class T>
void solve_transposed(const Gates<T>& x, T* dwh, T* dv, long V) {
  constexpr int W = kLanes<T>;
  const auto columns = [&](auto count, long v) {
    constexpr int N = sizeof(count);
    for (long j = C - 1; j >= 0; --j) {
      Vec<T> sums[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[n] = load(dwh + j * V + v + n * W);
      for (long i = C - 1; i > j; --i) {
        const T m = x.M[i * C + j];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[n] -= m * load(dv + i * V + v + n * W);
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        store(dwh + j * V + v + n * W, sums[n]);
        store(dv + j * V + v + n * W, x.beta[j] * sums[n]);
      }
    }
  };
  struct Four {
    char size[4];
  };
  long v = 0;
  for (; v + 4 * W <= V; v += 4 * W) columns(Four{}, v);
  for (; v < V; v += W) columns(char{}, v);
}

/// next = e^G_C S + k^T diag(e^(G_C - G)) u; `tail_u` is room for the scaled rows.
template <class T>
void advance(const Gates<T>& x, const T* k, const T* u, T* tail_u, const T* S, T* next, long K,
             long V) {
  constexpr int W = kLanes<T>;
  const long ld = V + kPad;
  for (long i = 0; i < C; ++i) {
    for (long v = 0; v < V; v += W) store(tail_u + i * V + v, x.tail[i] * load(u + i * V + v));
  }
  const T chunk = x.chunk;
  product(
      K, V, C, Columns<T>{k, K}, tail_u, V,
      [&](long i, long j) { return chunk * load(S + i * ld + j); },
      [&](long i, long j, Vec<T> v) { store(next + i * ld + j, v); });
}

}  // namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH
