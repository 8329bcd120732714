#include "ops/attention/cpu/vector/attention_blocks.h"

#include "ops/vector_gemm.h"
#include "ops/vector_math.h"

namespace heddle::ops::HEDDLE_CPU_ARCH {
namespace {

constexpr long kBlock = kAttentionBlock;

static inline long smaller(long a, long b) { return a < b ? a : b; }
static inline long between(long x, long low, long high) {
  return x < low ? low : (x > high ? high : x);
}
static inline float log_of(float x) { return __builtin_logf(x); }
static inline double log_of(double x) { return __builtin_log(x); }

template <class T>
void pack(const void* source, long stride, long tokens, long dim, void* rows_out,
          void* columns_out) {
  using C = compute<T>;
  const T* x = static_cast<const T*>(source);
  const long padded = attention_padded_dim(dim);
  const long blocks = (tokens + kBlock - 1) / kBlock;
  if (rows_out != nullptr) {
    for (long t = 0; t < blocks * kBlock; ++t) {
      C* __restrict to = static_cast<C*>(rows_out) + t * padded;
      const T* __restrict from = x + t * stride;
      const long filled = t < tokens ? dim : 0;
      for (long i = 0; i < filled; ++i) to[i] = widen(from[i]);
      for (long i = filled; i < padded; ++i) to[i] = 0;
    }
  }
  if (columns_out != nullptr) {
    for (long b = 0; b < blocks; ++b) {
      C* to = static_cast<C*>(columns_out) + b * kBlock * padded;
      const long filled = smaller(kBlock, tokens - b * kBlock);
      for (long i = 0; i < padded; ++i) {
        C* __restrict line = to + i * kBlock;
        const T* __restrict from = x + b * kBlock * stride + i;
        const long valid = i < dim ? filled : 0;
        for (long t = 0; t < valid; ++t) line[t] = widen(from[t * stride]);
        for (long t = valid; t < kBlock; ++t) line[t] = 0;
      }
    }
  }
}

/// rows of T times factor into C, zero beyond dim.
template <class T, class C>
void load_rows(const T* x, long stride, long count, long dim, long padded, C factor, C* to) {
  for (long r = 0; r < count; ++r) {
    const T* __restrict from = x + r * stride;
    C* __restrict line = to + r * padded;
    for (long i = 0; i < dim; ++i) line[i] = widen(from[i]) * factor;
    for (long i = dim; i < padded; ++i) line[i] = 0;
  }
}

template <class T>
void forward(const AttentionHead& a, long begin, long end) {
  using C = compute<T>;
  const long rows = end - begin, padded = a.padded;
  C* const q = static_cast<C*>(a.scratch);
  C* const o = q + kBlock * padded;
  C* const scores = o + kBlock * padded;
  C* const largest = scores + kBlock * kBlock;
  C* const total = largest + kBlock;
  load_rows(static_cast<const T*>(a.q) + begin * a.q_stride, a.q_stride, rows, a.dim, padded,
            C(a.scale), q);
  for (long i = 0; i < rows * padded; ++i) o[i] = 0;
  for (long r = 0; r < rows; ++r) largest[r] = C(-3e38), total[r] = 0;
  // Row r sees keys up to and including diagonal + r.
  const long diagonal = a.keys - a.queries + begin;
  const long seen = between(diagonal + rows, 0, a.keys);
  for (long key = 0; key < seen; key += kBlock) {
    gemm(rows, kBlock, padded, q, padded, 1, static_cast<const C*>(a.key_columns) + key * padded,
         kBlock, scores, kBlock, false);
    for (long r = 0; r < rows; ++r) {
      C* __restrict s = scores + r * kBlock;
      const long visible = between(diagonal + r + 1 - key, 0, kBlock);
      C top = largest[r];
#pragma omp simd reduction(max : top)
      for (long i = 0; i < visible; ++i) top = s[i] > top ? s[i] : top;
      C sum = 0;
#pragma omp simd reduction(+ : sum)
      for (long i = 0; i < visible; ++i) {
        s[i] = exp_of(s[i] - top);
        sum += s[i];
      }
      for (long i = visible; i < kBlock; ++i) s[i] = 0;
      if (top != largest[r]) {
        const C shrink = exp_of(largest[r] - top);
        total[r] *= shrink;
        C* __restrict line = o + r * padded;
        for (long i = 0; i < padded; ++i) line[i] *= shrink;
        largest[r] = top;
      }
      total[r] += sum;
    }
    const long depth = smaller(kBlock, seen - key);
    gemm(rows, padded, depth, scores, kBlock, 1, static_cast<const C*>(a.value_rows) + key * padded,
         padded, o, padded, true);
  }
  for (long r = 0; r < rows; ++r) {
    const bool any = diagonal + r >= 0;
    const C inverse = any ? C(1) / total[r] : C(0);
    const C* __restrict line = o + r * padded;
    T* __restrict to = static_cast<T*>(a.out) + (begin + r) * a.o_stride;
    for (long i = 0; i < a.dim; ++i) narrow(line[i] * inverse, to[i]);
    if (a.lse != nullptr) {
      static_cast<C*>(a.lse)[(begin + r) * a.lse_stride] =
          any ? largest[r] + log_of(total[r]) : C(0);
    }
  }
}

template <class T>
void backward(const AttentionHead& a) {
  using C = compute<T>;
  const long padded = a.padded, rows_all = a.queries + kBlock;
  C* const q = static_cast<C*>(a.scratch);
  C* const d_o = q + rows_all * padded;
  C* const dq = d_o + rows_all * padded;
  C* const delta = dq + rows_all * padded;
  C* const p = delta + rows_all;
  C* const ds = p + kBlock * kBlock;
  const C scale = C(a.scale);
  load_rows(static_cast<const T*>(a.q), a.q_stride, a.queries, a.dim, padded, scale, q);
  load_rows(static_cast<const T*>(a.grad_o), a.o_stride, a.queries, a.dim, padded, C(1), d_o);
  for (long i = 0; i < a.queries * padded; ++i) dq[i] = 0;
  for (long r = 0; r < a.queries; ++r) {
    const T* __restrict o = static_cast<const T*>(a.o) + r * a.o_stride;
    const C* __restrict d = d_o + r * padded;
    C dot = 0;
#pragma omp simd reduction(+ : dot)
    for (long i = 0; i < a.dim; ++i) dot += widen(o[i]) * d[i];
    delta[r] = dot;
  }
  const long offset = a.keys - a.queries;  // query r sees keys up to offset + r
  for (long key = 0; key < a.keys; key += kBlock) {
    const long in_block = smaller(kBlock, a.keys - key);
    C* const dk = static_cast<C*>(a.grad_k) + key * padded;
    C* const dv = static_cast<C*>(a.grad_v) + key * padded;
    for (long i = 0; i < kBlock * padded; ++i) dk[i] = 0, dv[i] = 0;
    const long first = between(key - offset, 0, a.queries);
    for (long begin = first; begin < a.queries; begin += kBlock) {
      const long rows = smaller(kBlock, a.queries - begin);
      gemm(rows, kBlock, padded, q + begin * padded, padded, 1,
           static_cast<const C*>(a.key_columns) + key * padded, kBlock, p, kBlock, false);
      gemm(rows, kBlock, padded, d_o + begin * padded, padded, 1,
           static_cast<const C*>(a.value_columns) + key * padded, kBlock, ds, kBlock, false);
      for (long r = 0; r < rows; ++r) {
        const long visible = between(offset + begin + r + 1 - key, 0, in_block);
        C* __restrict p_row = p + r * kBlock;
        C* __restrict ds_row = ds + r * kBlock;
        const C lse = static_cast<const C*>(a.lse)[(begin + r) * a.lse_stride];
        const C row_delta = delta[begin + r];
#pragma omp simd
        for (long i = 0; i < visible; ++i) {
          p_row[i] = exp_of(p_row[i] - lse);
          ds_row[i] = p_row[i] * (ds_row[i] - row_delta);
        }
        for (long i = visible; i < kBlock; ++i) p_row[i] = 0, ds_row[i] = 0;
      }
      gemm(in_block, padded, rows, p, 1, kBlock, d_o + begin * padded, padded, dv, padded, true);
      // q carries the scale already.
      gemm(in_block, padded, rows, ds, 1, kBlock, q + begin * padded, padded, dk, padded, true);
      gemm(rows, padded, in_block, ds, kBlock, 1, static_cast<const C*>(a.key_rows) + key * padded,
           padded, dq + begin * padded, padded, true);
    }
  }
  for (long r = 0; r < a.queries; ++r) {
    T* __restrict to = static_cast<T*>(a.grad_q) + r * a.o_stride;
    const C* __restrict line = dq + r * padded;
    for (long i = 0; i < a.dim; ++i) narrow(line[i] * scale, to[i]);
  }
}

/// Calls f(token, its place in the caches).
template <class F>
void for_each_key(const AttentionStep& a, const F& f) {
  for (long first = 0, page = 0; first < a.keys; first += a.page_tokens, ++page) {
    const long count = a.keys - first < a.page_tokens ? a.keys - first : a.page_tokens;
    const long begin = a.pages[page] * a.page_tokens;
    for (long t = 0; t < count; ++t) f(first + t, begin + t);
  }
}

template <class T>
void step(const AttentionStep& a) {
  using C = compute<T>;
  const long keys = a.keys, group = a.group, dim = a.dim, padded = attention_padded_dim(dim);
  C* const q = static_cast<C*>(a.scratch);
  C* const scores = q + group * padded;  // [group,keys]
  load_rows(static_cast<const T*>(a.q), dim, group, dim, padded, C(a.scale), q);
  for_each_key(a, [&](long t, long place) {
    const T* __restrict k = static_cast<const T*>(a.k) + place * a.stride;
    for (long g = 0; g < group; ++g) {
      const C* __restrict row = q + g * padded;
      C dot = 0;
#pragma omp simd reduction(+ : dot)
      for (long i = 0; i < dim; ++i) dot += row[i] * widen(k[i]);
      scores[g * keys + t] = dot;
    }
  });
  for (long g = 0; g < group; ++g) {
    C* __restrict s = scores + g * keys;
    C top = C(-3e38), sum = 0;
#pragma omp simd reduction(max : top)
    for (long t = 0; t < keys; ++t) top = s[t] > top ? s[t] : top;
#pragma omp simd reduction(+ : sum)
    for (long t = 0; t < keys; ++t) {
      s[t] = exp_of(s[t] - top);
      sum += s[t];
    }
    const C inverse = keys > 0 ? C(1) / sum : C(0);
    for (long t = 0; t < keys; ++t) s[t] *= inverse;
    for (long i = 0; i < padded; ++i) q[g * padded + i] = 0;  // now the output
  }
  for_each_key(a, [&](long t, long place) {
    const T* __restrict v = static_cast<const T*>(a.v) + place * a.stride;
    for (long g = 0; g < group; ++g) {
      const C weight = scores[g * keys + t];
      C* __restrict line = q + g * padded;
#pragma omp simd
      for (long i = 0; i < dim; ++i) line[i] += weight * widen(v[i]);
    }
  });
  for (long g = 0; g < group; ++g) {
    T* __restrict to = static_cast<T*>(a.out) + g * dim;
    for (long i = 0; i < dim; ++i) narrow(q[g * padded + i], to[i]);
  }
}

}  // namespace

AttentionKernels attention_kernels(int element) {
  if (element == 0) return {pack<float>, forward<float>, backward<float>, step<float>};
  if (element == 1) return {pack<bf16>, forward<bf16>, backward<bf16>, step<bf16>};
  return {pack<double>, forward<double>, backward<double>, step<double>};
}

}  // namespace heddle::ops::HEDDLE_CPU_ARCH
