#include "ops/gated_delta_net/cpu/vector/chunk.h"

namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH {
namespace {

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

unsigned long backward_bytes(const RuleArgs& a, long heads) {
  Arena arena{nullptr};
  BackwardScratch<double>(arena, a, heads);
  return arena.used;
}

}  // namespace

void fill_backward(RuleKernels& kernels) {
  kernels.backward_bytes = backward_bytes;
  kernels.backward[0] = backward<float>;
  kernels.backward[1] = backward<simd::BFloat16>;
  kernels.backward[2] = backward<double>;
  kernels.reduce[0] = reduce<float>;
  kernels.reduce[1] = reduce<simd::BFloat16>;
  kernels.reduce[2] = reduce<double>;
}

}  // namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH
