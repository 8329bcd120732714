#include "ops/causal_conv1d/cpu/conv_kernels.h"
#include "ops/cpu_simd.h"

// A unit's rows are first brought into a scratch of the compute type with the W-1 rows before them
// (history, initial state or zero), so that the loops know neither boundaries, nor dtypes, nor
// channel counts that are no multiple of the vectors.
namespace heddle::ops::conv_cpu::HEDDLE_CPU_ARCH {
namespace {

namespace simd = ::heddle::ops::simd::HEDDLE_CPU_ARCH;
using simd::Compute;
using simd::kLanes;
using simd::load;
using simd::store;
using simd::Vec;

constexpr long kStride =
    kBlockChannels + 16;  // not a power of two: rows spread over the cache sets
constexpr long kRows = kBlockTokens + 2 * (kMaxTaps - 1);

template <class T>
struct Scratch {
  T x[kRows * kStride];   // from the row W-1 before the first
  T dc[kRows * kStride];  // likewise
  T weight[kMaxTaps * kStride];
};

/// n channels to a row of scratch, zero up to the next whole vector.
template <class T, class X>
HEDDLE_INLINE void load_row(T* to, const X* from, long n) {
  constexpr int W = kLanes<T>;
  long c = 0;
  for (; c + W <= n; c += W) store(to + c, load(from + c));
  if (c < n) {
    store(to + c, Vec<T>{});
    for (; c < n; ++c) to[c] = simd::scalar(from[c]);
  }
}
template <class T>
HEDDLE_INLINE void zero_row(T* to, long n) {
  for (long c = 0; c < n; c += kLanes<T>) store(to + c, Vec<T>{});
}
/// The first lanes of a vector that ends beyond the channels.
template <class X>
HEDDLE_INLINE void store_some(X* to, Vec<Compute<X>> v, long count) {
  using T = Compute<X>;
  if (count >= kLanes<T>) {
    store(to, v);
    return;
  }
  T lanes[kLanes<T>];
  store(lanes, v);
  for (long i = 0; i < count; ++i) simd::assign(to + i, lanes[i]);
}

/// Rows [unit.first - (W-1), last) of x, history included.
template <class X, class T>
void load_tokens(const ConvArgs& a, const ConvUnit& u, long last, Scratch<T>& s) {
  const long begin = a.cu_seqlens[u.sequence], history = a.W - 1;
  for (long t = u.first - history; t < last; ++t) {
    T* row = s.x + (t - u.first + history) * kStride;
    if (t >= begin) {
      load_row(row, static_cast<const X*>(a.x) + t * a.x_stride + u.channel, u.channels);
    } else if (a.initial != nullptr) {
      load_row(row,
               static_cast<const T*>(a.initial) +
                   (u.sequence * history + (t - begin + history)) * a.C + u.channel,
               u.channels);
    } else {
      zero_row(row, u.channels);
    }
  }
  for (long w = 0; w < a.W; ++w) {
    load_row(s.weight + w * kStride, static_cast<const T*>(a.weight) + w * a.C + u.channel,
             u.channels);
  }
}

/// The convolution that ends at row + (W-1) * kStride; TAPS 0: any number.
template <int TAPS, class T>
HEDDLE_INLINE Vec<T> convolve(const T* row, const T* weight, long taps) {
  Vec<T> c{};
  const long n = TAPS == 0 ? taps : TAPS;
  for (long w = 0; w < n; ++w) c += load(weight + w * kStride) * load(row + w * kStride);
  return c;
}

template <int TAPS, class X>
void forward_taps(const ConvArgs& a, const ConvUnit& u, Scratch<Compute<X>>& s) {
  using T = Compute<X>;
  constexpr int W = kLanes<T>;
  for (long t = u.first; t < u.last; ++t) {
    const T* row = s.x + (t - u.first) * kStride;
    X* y = static_cast<X*>(a.y) + t * a.C + u.channel;
    for (long c = 0; c < u.channels; c += W) {
      const Vec<T> v = convolve<TAPS>(row + c, s.weight + c, a.W);
      store_some(y + c, v * simd::sigmoid<T>(v), u.channels - c);
    }
  }
}

template <class X>
void forward(const ConvArgs& a, const ConvUnit& u, void* memory) {
  auto& s = *static_cast<Scratch<Compute<X>>*>(memory);
  load_tokens<X>(a, u, u.last, s);
  a.W == 4 ? forward_taps<4, X>(a, u, s) : forward_taps<0, X>(a, u, s);
}

template <int TAPS, class X>
void backward_taps(const ConvArgs& a, const ConvUnit& u, Scratch<Compute<X>>& s) {
  using T = Compute<X>;
  constexpr int W = kLanes<T>;
  const long begin = a.cu_seqlens[u.sequence], end = a.cu_seqlens[u.sequence + 1];
  const long history = (TAPS == 0 ? a.W : TAPS) - 1;
  // dc reaches `history` rows beyond the block, because their gradients come back to it.
  const long last = u.last + history < end ? u.last + history : end;
  load_tokens<X>(a, u, last, s);
  for (long r = 0; r < history; ++r) {
    zero_row(s.dc + r * kStride, u.channels);
    zero_row(s.dc + (u.last - u.first + history + r) * kStride, u.channels);
  }
  for (long t = u.first; t < last; ++t) {
    const T* row = s.x + (t - u.first) * kStride;
    T* dc = s.dc + (t - u.first + history) * kStride;
    load_row(dc, static_cast<const X*>(a.dy) + t * a.C + u.channel, u.channels);
    for (long c = 0; c < u.channels; c += W) {
      const Vec<T> v = convolve<TAPS>(row + c, s.weight + c, a.W);
      const Vec<T> gate = simd::sigmoid<T>(v);
      store(dc + c, load(dc + c) * gate * (T(1) + v * (T(1) - gate)));
    }
  }
  const auto gradient = [&](long r, long c) {  // of row u.first + r
    Vec<T> d{};
    for (long w = 0; w <= history; ++w) {
      d += load(s.weight + w * kStride + c) * load(s.dc + (r + 2 * history - w) * kStride + c);
    }
    return d;
  };
  for (long t = u.first; t < u.last; ++t) {
    X* dx = static_cast<X*>(a.dx) + t * a.C + u.channel;
    const T* also = a.d_final != nullptr && t >= end - history
                        ? static_cast<const T*>(a.d_final) +
                              (u.sequence * history + t - (end - history)) * a.C + u.channel
                        : nullptr;
    for (long c = 0; c < u.channels; c += W) {
      Vec<T> d = gradient(t - u.first, c);
      if (also != nullptr) {
        alignas(64) T lanes[W] = {};
        for (long i = 0; i < W && c + i < u.channels; ++i) lanes[i] = also[c + i];
        d += load(lanes);
      }
      store_some(dx + c, d, u.channels - c);
    }
  }
  if (a.d_initial != nullptr && u.first == begin) {
    for (long r = 0; r < history; ++r) {
      T* d = static_cast<T*>(a.d_initial) + (u.sequence * history + r) * a.C + u.channel;
      for (long c = 0; c < u.channels; c += W) {
        store_some(d + c, gradient(r - history, c), u.channels - c);
      }
    }
  }
  T* dw = static_cast<T*>(a.dw_blocks) + u.block * a.W * a.C + u.channel;
  for (long c = 0; c < u.channels; c += W) {
    Vec<T> sums[kMaxTaps];
    for (long w = 0; w <= history; ++w) sums[w] = Vec<T>{};
    for (long r = 0; r < u.last - u.first; ++r) {
      const Vec<T> d = load(s.dc + (r + history) * kStride + c);
      for (long w = 0; w <= history; ++w) sums[w] += d * load(s.x + (r + w) * kStride + c);
    }
    for (long w = 0; w <= history; ++w) store_some(dw + w * a.C + c, sums[w], u.channels - c);
  }
}

template <class X>
void backward(const ConvArgs& a, const ConvUnit& u, void* memory) {
  auto& s = *static_cast<Scratch<Compute<X>>*>(memory);
  a.W == 4 ? backward_taps<4, X>(a, u, s) : backward_taps<0, X>(a, u, s);
}

template <class X>
void step(const void* x_row, const void* weights, void* states, void* y_row, long C, long taps) {
  using T = Compute<X>;
  constexpr int W = kLanes<T>;
  const X* x = static_cast<const X*>(x_row);
  const T* weight = static_cast<const T*>(weights);
  X* state = static_cast<X*>(states);
  X* y = static_cast<X*>(y_row);
  const long history = taps - 1;
  for (long c = 0; c < C; c += W) {
    T sums[W] = {};
    const long n = C - c < W ? C - c : W;
    for (long i = 0; i < n; ++i) {
      X* window = state + (c + i) * history;
      const T* w = weight + (c + i) * taps;
      T sum = w[history] * simd::scalar(x[c + i]);
      for (long k = 0; k < history; ++k) sum += w[k] * simd::scalar(window[k]);
      for (long k = 0; k + 1 < history; ++k) window[k] = window[k + 1];
      window[history - 1] = x[c + i];
      sums[i] = sum;
    }
    const Vec<T> v = load(sums);
    store_some(y + c, v * simd::sigmoid<T>(v), n);
  }
}

}  // namespace

const ConvKernels& conv_kernels() {
  static const ConvKernels kernels = {sizeof(Scratch<double>),
                                      {forward<float>, forward<simd::BFloat16>, forward<double>},
                                      {backward<float>, backward<simd::BFloat16>, backward<double>},
                                      {step<float>, step<simd::BFloat16>, step<double>}};
  return kernels;
}

}  // namespace heddle::ops::conv_cpu::HEDDLE_CPU_ARCH
