#include "ops/gated_delta_net/cpu/rule_kernels.h"
#include "ops/gated_delta_net/cpu/vector/product.h"

// The chunked gated delta rule. Notation and identities: docs/gdn.md; here q is normalised and
// scaled, e = u / beta is kept instead of u (so that d beta needs no division), and the triangular
// system is solved by substitution instead of forming its inverse.
//
// Matrices of token rows ([chunk][K], [chunk][V]) have features in their lanes; those marked T are
// transposed and have tokens in their lanes, as have dqT and dkT: products with S^T then need no
// transposed state.
namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH {
namespace {

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

/// What the value heads of a key head share in one segment, per chunk.
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

template <class T>
struct ForwardScratch {
  Shared<T> shared[kChunks];
  T *S, *w, *u, *o, *tail_u;

  ForwardScratch(Arena& arena, const RuleArgs& a, long heads) {
    take_shared(arena, shared, a.K);
    S = arena.take<T>(heads * a.K * (a.V + kPad));
    w = arena.take<T>(C * a.V);
    u = arena.take<T>(C * a.V);
    o = arena.take<T>(C * a.V);
    tail_u = arena.take<T>(C * a.V);
  }
};

template <class X>
void forward(const RuleArgs& a, const RuleUnit& unit, void* memory) {
  using T = Compute<X>;
  Arena arena{static_cast<char*>(memory)};
  const ForwardScratch<T> f(arena, a, unit.heads);
  const long K = a.K, V = a.V, ld = V + kPad, state_size = K * ld;
  const long begin = a.cu_seqlens[unit.sequence], end = a.cu_seqlens[unit.sequence + 1];
  for (long h = 0; h < unit.heads; ++h) {
    T* S = f.S + h * state_size;
    if (a.initial != nullptr) {
      copy_state(
          S, ld,
          static_cast<const T*>(a.initial) + (unit.sequence * a.Hv + unit.first_head + h) * K * V,
          V, K, V);
    } else {
      zero(S, state_size);
    }
  }
  long segment = a.first_segment[unit.sequence];
  for (long first = begin; first < end; first += kSegment, ++segment) {
    const long last = first + kSegment < end ? first + kSegment : end;
    for (long token = first, c = 0; token < last; token += C, ++c) {
      prepare<X>(a, unit, token, last - token < C ? last - token : C, f.shared[c]);
    }
    for (long h = 0; h < unit.heads; ++h) {
      const long head = unit.first_head + h;
      T* S = f.S + h * state_size;
      if (a.states != nullptr) {
        copy_state(static_cast<T*>(a.states) + (segment * a.Hv + head) * K * V, V, S, ld, K, V);
      }
      for (long token = first, c = 0; token < last; token += C, ++c) {
        const Shared<T>& s = f.shared[c];
        const long n = last - token < C ? last - token : C;
        Gates<T> x;
        fill_gates(a, head, token, n, s, x);
        load_rows(f.w, static_cast<const X*>(a.v) + token * a.v_stride + head * V, a.v_stride, n,
                  V);
        // Q S and W = V - e^G K S in one pass over the state.
        product(2 * C, V, K, Columns<T>{s.qkT, 2 * C}, S, ld, Zero<T>{},
                [&](long i, long j, Vec<T> v) {
                  if (i < C) {
                    store(f.o + i * V + j, x.grow[i] * v);
                  } else {
                    T* w = f.w + (i - C) * V + j;
                    store(w, load(w) - x.grow[i - C] * v);
                  }
                });
        solve(x, f.w, f.u, V);
        X* o = static_cast<X*>(a.o) + (token * a.Hv + head) * V;
        product(
            C, V, C, Rows<T>{x.P, C}, f.u, V, [&](long i, long j) { return load(f.o + i * V + j); },
            [&](long i, long j, Vec<T> v) {
              if (i < n) store(o + i * a.Hv * V + j, v);
            });
        advance(x, s.qk_rows + C * K, f.u, f.tail_u, S, S, K, V);
        if (a.error != nullptr) {
          copy(static_cast<T*>(a.error) + (head * a.T + token) * V, f.w, n * V);
        }
      }
    }
  }
  if (a.final == nullptr) return;
  for (long h = 0; h < unit.heads; ++h) {
    copy_state(static_cast<T*>(a.final) + (unit.sequence * a.Hv + unit.first_head + h) * K * V, V,
               f.S + h * state_size, ld, K, V);
  }
}

template <class T>
struct BackwardScratch {
  Shared<T> shared[kChunks];
  Gates<T>* gates;  // [kChunks]
  T* S;             // [kChunks] states at the start of each chunk
  T* dS;            // [heads]
  T *u, *e;         // [kSegment][V]
  T *dqT, *dkT;     // [kChunks][K][C]
  T* grads;         // [2C][V]: dO, then dv
  T* scaled;        // [2C][V]: e^G dO, then -e^G dv
  T* gradsT;        // [V][2C]
  T *dwh, *uT;      // [C][V], [V][C]
  T *dP, *sym;      // [2C][C] dP, then D + D^T
  T *D, *dPT;       // [C][C]
  T* rows;          // [C][K]

  BackwardScratch(Arena& arena, const RuleArgs& a, long heads) {
    const long K = a.K, V = a.V;
    take_shared(arena, shared, K);
    gates = arena.take<Gates<T>>(kChunks);
    S = arena.take<T>(kChunks * K * (V + kPad));
    dS = arena.take<T>(heads * K * (V + kPad));
    u = arena.take<T>(kSegment * V);
    e = arena.take<T>(kSegment * V);
    dqT = arena.take<T>(kSegment * K);
    dkT = arena.take<T>(kSegment * K);
    grads = arena.take<T>(2 * C * V);
    scaled = arena.take<T>(2 * C * V);
    gradsT = arena.take<T>(2 * C * V);
    dwh = arena.take<T>(C * V);
    uT = arena.take<T>(C * V);
    dP = arena.take<T>(2 * C * C);
    sym = dP == nullptr ? nullptr : dP + C * C;
    D = arena.take<T>(C * C);
    dPT = arena.take<T>(C * C);
    rows = arena.take<T>(C * K);
  }
};

/// One chunk of one value head, dS leaving it on entry and entering it on return.
template <class X, class T>
void backward_chunk(const RuleArgs& a, long head, long token, long n, const Shared<T>& s,
                    const Gates<T>& x, const BackwardScratch<T>& f, const T* S, T* dS, const T* u,
                    const T* e, T* dqT, T* dkT) {
  constexpr int W = kLanes<T>;
  const long K = a.K, V = a.V, ld = V + kPad;
  const T* k = s.qk_rows + C * K;
  T *dO = f.grads, *dv = f.grads + C * V;
  load_rows(dO, static_cast<const X*>(a.d_o) + (token * a.Hv + head) * V, a.Hv * V, n, V);
  simd::transpose(f.uT, C, u, V, C, V);

  // dU = e^(G_C - G) K dS + P^T dO, then the triangular system.
  product(C, V, K, Columns<T>{s.qkT + C, 2 * C}, dS, ld, Zero<T>{},
          [&](long i, long j, Vec<T> v) { store(f.dwh + i * V + j, x.tail[i] * v); });
  product(
      C, V, C, Columns<T>{x.P, C}, dO, V, [&](long i, long j) { return load(f.dwh + i * V + j); },
      [&](long i, long j, Vec<T> v) { store(f.dwh + i * V + j, v); });
  solve_transposed(x, f.dwh, dv, V);

  X* dv_rows = static_cast<X*>(a.dv) + token * a.dv_stride + head * V;
  T* dbeta = static_cast<T*>(a.dbeta) + token * a.Hv + head;
  for (long i = 0; i < n; ++i) {
    copy(dv_rows + i * a.dv_stride, dv + i * V, V);
    dbeta[i * a.Hv] = dot(f.dwh + i * V, e + i * V, V);
  }
  for (long i = 0; i < C; ++i) {
    const T grow = x.grow[i];
    for (long v = 0; v < V; v += W) {
      store(f.scaled + i * V + v, grow * load(dO + i * V + v));
      store(f.scaled + (C + i) * V + v, -grow * load(dv + i * V + v));
    }
  }
  simd::transpose(f.gradsT, 2 * C, f.grads, V, 2 * C, V);

  // dP = decay dO U^T and D = -stril(decay dv U^T); their share of dG is rows minus columns of
  // dP * q k^T + D * k k^T.
  product(2 * C, C, V, Columns<T>{f.gradsT, 2 * C}, f.uT, C, Zero<T>{},
          [&](long i, long j, Vec<T> v) {
            if (i < C) {
              store(f.dP + i * C + j, v * load(x.decay + i * C + j));
            } else {
              store(f.D + (i - C) * C + j, -v * load(x.decay + (i - C) * C + j));
            }
          });
  for (long i = 0; i < C; ++i) f.D[i * C + i] = 0;
  T row_sums[C];
  Vec<T> column_sums[C / W];
  for (long j = 0; j < C / W; ++j) column_sums[j] = Vec<T>{};
  for (long i = 0; i < C; ++i) {
    Vec<T> row{};
    for (long j = 0; j < C / W; ++j) {
      const long at = i * C + j * W;
      const Vec<T> z = load(f.dP + at) * load(s.qk + at) + load(f.D + at) * load(s.kk + at);
      row += z;
      column_sums[j] += z;
    }
    row_sums[i] = simd::sum<T>(row);
  }
  simd::transpose(f.dPT, C, f.dP, C, C, C);
  simd::transpose(f.sym, C, f.D, C, C, C);
  for (long i = 0; i < C * C; i += W) store(f.sym + i, load(f.sym + i) + load(f.D + i));

  // Through the states: dq = e^G dO S^T, dk = e^(G_C - G) U dS^T - e^G dv S^T, all transposed.
  Vec<T> dG[C / W];
  Vec<T> written[C / W];
  for (long j = 0; j < C / W; ++j) {
    dG[j] = load(row_sums + j * W) - column_sums[j];
    written[j] = Vec<T>{};
  }
  product(K, 2 * C, V, Rows<T>{S, ld}, f.gradsT, 2 * C, Zero<T>{}, [&](long i, long j, Vec<T> v) {
    const long lane = j < C ? j : j - C;
    T* to = (j < C ? dqT : dkT) + i * C + lane;
    const Vec<T> d = (j < C ? v : -v) * load(x.grow + lane);
    dG[lane / W] += d * load(s.qkT + i * 2 * C + j);
    store(to, load(to) + d);
  });
  product(K, C, V, Rows<T>{dS, ld}, f.uT, C, Zero<T>{}, [&](long i, long j, Vec<T> v) {
    const Vec<T> d = v * load(x.tail + j);
    written[j / W] += d * load(s.qkT + i * 2 * C + C + j);
    store(dkT + i * C + j, load(dkT + i * C + j) + d);
  });
  // Inside the chunk: dq += dP k, dk += dP^T q + (D + D^T) k.
  product(
      K, C, C, Columns<T>{k, K}, f.dPT, C, [&](long i, long j) { return load(dqT + i * C + j); },
      [&](long i, long j, Vec<T> v) { store(dqT + i * C + j, v); });
  product(
      K, C, 2 * C, Columns<T>{s.qk_rows, K}, f.dP, C,
      [&](long i, long j) { return load(dkT + i * C + j); },
      [&](long i, long j, Vec<T> v) { store(dkT + i * C + j, v); });

  // dS = e^G_C dS + (e^G q)^T dO - (e^G k)^T dv.
  Vec<T> overlap{};
  const T chunk = x.chunk;
  product(
      K, V, 2 * C, Columns<T>{s.qk_rows, K}, f.scaled, V,
      [&](long i, long j) {
        const Vec<T> d = chunk * load(dS + i * ld + j);
        overlap += d * load(S + i * ld + j);
        return d;
      },
      [&](long i, long j, Vec<T> v) { store(dS + i * ld + j, v); });

  // <dS, S> of the state that leaves belongs to the last row.
  T sums[C];
  Vec<T> all_written{};
  for (long j = 0; j < C / W; ++j) {
    store(sums + j * W, dG[j] - written[j]);
    all_written += written[j];
  }
  double total = static_cast<double>(simd::sum<T>(overlap)) + simd::sum<T>(all_written);
  T* dg = static_cast<T*>(a.dg) + token * a.Hv + head;
  for (long i = C - 1; i >= 0; --i) {
    total += static_cast<double>(sums[i]);
    if (i < n) dg[i * a.Hv] = static_cast<T>(total);
  }
}

/// The gradient of a raw row from that of its unit row times `factor`; `unit` is that scaled row.
template <class X, class T>
HEDDLE_INLINE void through_norm(X* to, const T* d, const T* unit, T r, T factor, bool normalize,
                                long K) {
  const T along = normalize ? dot(d, unit, K) / factor : T(0);
  for (long j = 0; j < K; j += kLanes<T>) {
    store(to + j, r * (factor * load(d + j) - along * load(unit + j)));
  }
}

template <class X>
void backward(const RuleArgs& a, const RuleUnit& unit, void* memory) {
  using T = Compute<X>;
  Arena arena{static_cast<char*>(memory)};
  const BackwardScratch<T> f(arena, a, unit.heads);
  const long K = a.K, V = a.V, ld = V + kPad, state_size = K * ld;
  const long begin = a.cu_seqlens[unit.sequence], end = a.cu_seqlens[unit.sequence + 1];
  const long first_state = (unit.sequence * a.Hv + unit.first_head) * K * V;
  for (long h = 0; h < unit.heads; ++h) {
    T* dS = f.dS + h * state_size;
    if (a.d_final != nullptr) {
      copy_state(dS, ld, static_cast<const T*>(a.d_final) + first_state + h * K * V, V, K, V);
    } else {
      zero(dS, state_size);
    }
  }
  const long segments = (end - begin + kSegment - 1) / kSegment;
  for (long index = segments - 1; index >= 0; --index) {
    const long first = begin + index * kSegment;
    const long last = first + kSegment < end ? first + kSegment : end;
    const long chunks = (last - first + C - 1) / C;
    const auto rows_of = [&](long c) {
      const long left = last - first - c * C;
      return left < C ? left : C;
    };
    for (long c = 0; c < chunks; ++c) prepare<X>(a, unit, first + c * C, rows_of(c), f.shared[c]);
    zero(f.dqT, kSegment * K);
    zero(f.dkT, kSegment * K);
    for (long h = 0; h < unit.heads; ++h) {
      const long head = unit.first_head + h;
      copy_state(f.S, ld,
                 static_cast<const T*>(a.states) +
                     ((a.first_segment[unit.sequence] + index) * a.Hv + head) * K * V,
                 V, K, V);
      for (long c = 0; c < chunks; ++c) {
        const long token = first + c * C;
        const Shared<T>& s = f.shared[c];
        T *e = f.e + c * C * V, *u = f.u + c * C * V;
        fill_gates(a, head, token, rows_of(c), s, f.gates[c]);
        load_rows(e, static_cast<const T*>(a.error) + (head * a.T + token) * V, V, rows_of(c), V);
        for (long i = 0; i < C; ++i) {
          for (long v = 0; v < V; v += kLanes<T>) {
            store(u + i * V + v, f.gates[c].beta[i] * load(e + i * V + v));
          }
        }
        if (c + 1 < chunks) {
          T* S = f.S + c * state_size;
          advance(f.gates[c], s.qk_rows + C * K, u, f.scaled, S, S + state_size, K, V);
        }
      }
      for (long c = chunks - 1; c >= 0; --c) {
        backward_chunk<X>(a, head, first + c * C, rows_of(c), f.shared[c], f.gates[c], f,
                          f.S + c * state_size, f.dS + h * state_size, f.u + c * C * V,
                          f.e + c * C * V, f.dqT + c * C * K, f.dkT + c * C * K);
      }
    }
    for (long c = 0; c < chunks; ++c) {
      const Shared<T>& s = f.shared[c];
      for (int which = 0; which < 2; ++which) {
        const T* unit_rows = s.qk_rows + which * C * K;
        simd::transpose(f.rows, K, (which == 0 ? f.dqT : f.dkT) + c * C * K, C, K, C);
        void* parts = which == 0 ? a.dq_parts : a.dk_parts;
        const long stride = which == 0 ? a.dq_stride : a.dk_stride;
        for (long i = 0; i < rows_of(c); ++i) {
          const long token = first + c * C + i;
          if (parts != nullptr) {
            copy(static_cast<T*>(parts) + ((unit.part * a.T + token) * a.Hk + unit.key_head) * K,
                 f.rows + i * K, K);
          } else {
            through_norm(
                static_cast<X*>(which == 0 ? a.dq : a.dk) + token * stride + unit.key_head * K,
                f.rows + i * K, unit_rows + i * K, (which == 0 ? s.rq : s.rk)[i],
                which == 0 ? T(a.scale) : T(1), a.normalize, K);
          }
        }
      }
    }
  }
  if (a.d_initial == nullptr) return;
  for (long h = 0; h < unit.heads; ++h) {
    copy_state(static_cast<T*>(a.d_initial) + first_state + h * K * V, V, f.dS + h * state_size, ld,
               K, V);
  }
}

template <class X>
void reduce(const RuleArgs& a, long parts, long first, long last) {
  using T = Compute<X>;
  constexpr long kMaxRow = 1024;
  alignas(64) T sum[kMaxRow];
  alignas(64) T unit[kMaxRow];
  for (long token = first; token < last; ++token) {
    for (long head = 0; head < a.Hk; ++head) {
      for (int which = 0; which < 2; ++which) {
        const T* shares = static_cast<const T*>(which == 0 ? a.dq_parts : a.dk_parts);
        zero(sum, a.K);
        for (long part = 0; part < parts; ++part) {
          const T* share = shares + ((part * a.T + token) * a.Hk + head) * a.K;
          for (long j = 0; j < a.K; j += kLanes<T>) store(sum + j, load(sum + j) + load(share + j));
        }
        const X* raw = static_cast<const X*>(which == 0 ? a.q : a.k) +
                       token * (which == 0 ? a.q_stride : a.k_stride) + head * a.K;
        copy(unit, raw, a.K);
        const T r = a.normalize ? T(1) / root(dot(unit, unit, a.K) + T(kNormEps)) : T(1);
        const T factor = which == 0 ? T(a.scale) : T(1);
        for (long j = 0; j < a.K; j += kLanes<T>) {
          store(unit + j, (r * factor) * load(unit + j));
        }
        through_norm(static_cast<X*>(which == 0 ? a.dq : a.dk) +
                         token * (which == 0 ? a.dq_stride : a.dk_stride) + head * a.K,
                     sum, unit, r, factor, a.normalize, a.K);
      }
    }
  }
}

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

unsigned long scratch_bytes(const RuleArgs& a, long heads, bool backward) {
  Arena arena{nullptr};
  if (backward) {
    BackwardScratch<double>(arena, a, heads);
  } else {
    ForwardScratch<double>(arena, a, heads);
  }
  return arena.used;
}

}  // namespace

const RuleKernels& rule_kernels() {
  static const RuleKernels kernels = {scratch_bytes,
                                      {forward<float>, forward<simd::BFloat16>, forward<double>},
                                      {backward<float>, backward<simd::BFloat16>, backward<double>},
                                      {reduce<float>, reduce<simd::BFloat16>, reduce<double>},
                                      {step<float>, step<simd::BFloat16>, step<double>}};
  return kernels;
}

}  // namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH
