// A thread owns a few channels and walks down a tile of tokens with the last inputs in registers,
// so that each input is read once but for the rows before (backward: and after) the tile. The walk
// meets the boundaries of the sequences in order; meeting one is a branch that the whole CTA takes.
// kTaps is the number of taps held; a narrower kernel is held with zero taps in front.
#include "ops/causal_conv1d/cuda/causal_conv1d.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/cuda/column_sum.h"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kForwardTile = 128, kBackwardTile = 256;
// Rows whose loads are issued together, while those before them are worked on.
constexpr int kAhead = 4;

struct Arguments {
  int tokens, channels, width, sequences, tile;
  Element weight_type;
  InputRows x, grad_y;
  const void* weight;
  const int* cu_seqlens;
  const void *initial_state, *grad_final_state;
  void *y, *final_state, *grad_x, *grad_initial_state;
  float* partial;
};

/// The sequence a walk over the tokens is in.
struct Sequence {
  int index, begin, end;

  /// The one that holds `token`; empty sequences hold none.
  __device__ Sequence(const Arguments& a, int token) {
    int low = 0, high = a.sequences;  // cu_seqlens[low] <= token < cu_seqlens[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (a.cu_seqlens[middle] <= token ? low : high) = middle;
    }
    index = low, begin = a.cu_seqlens[low], end = a.cu_seqlens[low + 1];
  }

  /// From its end on to the next one that is not empty.
  __device__ void advance(const Arguments& a) {
    begin = end;
    do {
      ++index;
      end = a.cu_seqlens[index + 1];
    } while (end == begin);
  }
};

/// Entry `position` (0 to width - 2) of a [sequences, channels, width - 1] state.
template <class T>
__device__ __forceinline__ float state_at(const void* state, const Arguments& a, int sequence,
                                          int channel, int position) {
  float value[1];
  read(static_cast<const T*>(state) +
           (static_cast<int64_t>(sequence) * a.channels + channel) * (a.width - 1) + position,
       value);
  return value[0];
}

template <class T>
__device__ __forceinline__ void set_state(void* state, const Arguments& a, int sequence,
                                          int channel, int position, float value) {
  const float one[1] = {value};
  write(static_cast<T*>(state) +
            (static_cast<int64_t>(sequence) * a.channels + channel) * (a.width - 1) + position,
        one);
}

/// The taps of N channels, oldest first.
template <int N, int kTaps>
__device__ __forceinline__ void read_taps(const Arguments& a, int channel,
                                          float (&taps)[kTaps][N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int w = 0; w < kTaps; ++w) {
      const int tap = w - (kTaps - a.width);
      float value[1] = {0};
      if (tap >= 0) {
        read_weight(a.weight, a.weight_type, static_cast<int64_t>(channel + n) * a.width + tap,
                    value);
      }
      taps[w][n] = value[0];
    }
  }
}

/// The kTaps - 1 inputs before `token`, oldest first: from x inside the sequence, from the initial
/// state or zero before it. Those that only a zero tap would meet are zero, whatever lies there.
template <class T, int N, int kTaps>
__device__ __forceinline__ void read_history(const Arguments& a, const Sequence& sequence,
                                             int channel, int token,
                                             float (&history)[kTaps - 1][N]) {
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    const int row = token - (kTaps - 1) + i;
    const int position = row - sequence.begin + a.width - 1;
#pragma unroll
    for (int n = 0; n < N; ++n) history[i][n] = 0;
    if (i < kTaps - a.width) continue;
    if (row >= sequence.begin) {
      read(static_cast<const T*>(a.x.data) + row * a.x.outer_stride + channel, history[i]);
    } else if (a.initial_state != nullptr) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        history[i][n] = state_at<T>(a.initial_state, a, sequence.index, channel + n, position);
      }
    }
  }
}

/// Moves the window of the last inputs on by one.
template <int N, int kTaps>
__device__ __forceinline__ void shift(float (&history)[kTaps - 1][N], const float (&x)[N],
                                      int width) {
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float next = i + 1 < kTaps - 1 ? history[i + 1][n] : x[n];
      // Kernels of all taps need no test; narrower ones keep zero where a zero tap stands.
      history[i][n] = kTaps == 4 || i >= kTaps - width ? next : 0.f;
    }
  }
}

template <int N, int kTaps>
__device__ __forceinline__ float convolve(const float (&taps)[kTaps][N],
                                          const float (&history)[kTaps - 1][N], const float (&x)[N],
                                          int n) {
  float c = taps[kTaps - 1][n] * x[n];
#pragma unroll
  for (int w = 0; w < kTaps - 1; ++w) c += taps[w][n] * history[w][n];
  return c;
}

/// A thread's part of kAhead rows.
template <class T, int N>
struct RowsAhead {
  Packed<T, N> row[kAhead];

  /// Steps from `token` on that lie before `end`.
  __device__ __forceinline__ void load_from(const T* from, int64_t stride, int token, int end) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (token + j < end) row[j] = load<N>(from + (token + j) * stride);
  }
};

template <class T, int N, int kTaps>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ Arguments a) {
  const int channel = (blockIdx.x * kThreads + threadIdx.x) * N;
  if (channel >= a.channels) return;
  const int first = blockIdx.y * a.tile, last = min(first + a.tile, a.tokens);
  float taps[kTaps][N], history[kTaps - 1][N];
  read_taps<N, kTaps>(a, channel, taps);
  Sequence sequence(a, first);
  read_history<T, N, kTaps>(a, sequence, channel, first, history);
  const T* x = static_cast<const T*>(a.x.data) + channel;
  T* y = static_cast<T*>(a.y) + channel;
  const auto step = [&](const Packed<T, N>& packed, int token) {
    float now[N], out[N];
    unpack(packed, now);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float c = convolve<N, kTaps>(taps, history, now, n);
      out[n] = c * sigmoid(c);
    }
    write(y + static_cast<int64_t>(token) * a.channels, out);
    shift<N, kTaps>(history, now, a.width);
  };
  RowsAhead<T, N> next;
  next.load_from(x, a.x.outer_stride, first, last);
  for (int t = first; t < last; t += kAhead) {
    const RowsAhead<T, N> ahead = next;
    next.load_from(x, a.x.outer_stride, t + kAhead, last);
    if (t + kAhead <= min(last, sequence.end)) {
      // No test between the tokens, so that their arithmetic can overlap.
#pragma unroll
      for (int j = 0; j < kAhead; ++j) step(ahead.row[j], t + j);
      continue;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (t + j >= last) break;
      if (t + j == sequence.end) {
        sequence.advance(a);
        read_history<T, N, kTaps>(a, sequence, channel, t + j, history);
      }
      step(ahead.row[j], t + j);
    }
  }
}

/// The walk of the backward: at token t the gradient of the convolution's output is known up to t,
/// which completes the gradient of the input kTaps - 1 tokens before. kWeight: the gradient of the
/// taps is wanted.
template <class T, int N, int kTaps, bool kWeight>
__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ Arguments a) {
  const int channel = (blockIdx.x * kThreads + threadIdx.x) * N;
  if (channel >= a.channels) return;
  const int first = blockIdx.y * a.tile, last = min(first + a.tile, a.tokens);
  float taps[kTaps][N], history[kTaps - 1][N], d_taps[kTaps][N] = {};
  float dc[kTaps][N] = {};  // of the tokens t - (kTaps - 1) to t
  read_taps<N, kTaps>(a, channel, taps);
  Sequence sequence(a, first);
  read_history<T, N, kTaps>(a, sequence, channel, first, history);
  const T* x = static_cast<const T*>(a.x.data) + channel;
  const T* dy = static_cast<const T*>(a.grad_y.data) + channel;
  T* dx = static_cast<T*>(a.grad_x) + channel;

  // The gradient of the input `row`, whose later outputs' gradients dc holds.
  const auto put = [&](int row) {
    float out[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      out[n] = 0;
#pragma unroll
      for (int w = 0; w < kTaps; ++w) out[n] += taps[kTaps - 1 - w][n] * dc[w][n];
    }
    const int position = row - sequence.end + a.width - 1;
    if (a.grad_final_state != nullptr && position >= 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        out[n] += state_at<T>(a.grad_final_state, a, sequence.index, channel + n, position);
      }
    }
    write(dx + static_cast<int64_t>(row) * a.channels, out);
  };
  // Makes room in dc for the next token's.
  const auto advance = [&] {
#pragma unroll
    for (int w = 0; w < kTaps; ++w) {
#pragma unroll
      for (int n = 0; n < N; ++n) dc[w][n] = w + 1 < kTaps ? dc[w + 1][n] : 0.f;
    }
  };
  const auto put_if_own = [&](int row) {
    if (row >= first && row < last && row >= sequence.begin) put(row);
    advance();
  };
  // Adds one token to dc and the history, and to the gradient of the taps if it is the tile's own.
  const auto take = [&](const Packed<T, N>& x_packed, const Packed<T, N>& dy_packed, bool own) {
    float in[N], out[N];
    unpack(x_packed, in);
    unpack(dy_packed, out);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float c = convolve<N, kTaps>(taps, history, in, n), s = sigmoid(c);
      dc[kTaps - 1][n] = out[n] * s * (1.f + c * (1.f - s));
      if (kWeight && own) {
        d_taps[kTaps - 1][n] += dc[kTaps - 1][n] * in[n];
#pragma unroll
        for (int w = 0; w < kTaps - 1; ++w) d_taps[w][n] += dc[kTaps - 1][n] * history[w][n];
      }
    }
    shift<N, kTaps>(history, in, a.width);
  };

  // Beyond the tile only the gradients that its last inputs still need.
  const int beyond = min(last + kTaps - 1, a.tokens);
  RowsAhead<T, N> x_next, dy_next;
  x_next.load_from(x, a.x.outer_stride, first, beyond);
  dy_next.load_from(dy, a.grad_y.outer_stride, first, beyond);
  bool done = false;
  for (int t = first; t < beyond && !done; t += kAhead) {
    const RowsAhead<T, N> x_ahead = x_next, dy_ahead = dy_next;
    x_next.load_from(x, a.x.outer_stride, t + kAhead, beyond);
    dy_next.load_from(dy, a.grad_y.outer_stride, t + kAhead, beyond);
    if (a.grad_final_state == nullptr && t - (kTaps - 1) >= max(first, sequence.begin) &&
        t + kAhead <= min(last, sequence.end)) {
      // Inside a sequence and the tile: no test between the tokens, so that their arithmetic can
      // overlap.
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        take(x_ahead.row[j], dy_ahead.row[j], true);
        put(t + j - (kTaps - 1));
        advance();
      }
      continue;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int now = t + j;
      if (now >= beyond || done) break;
      if (now == sequence.end) {
        // Nothing of the next sequence reaches back into this one.
        for (int w = 0; w < kTaps - 1; ++w) put_if_own(now - (kTaps - 1) + w);
        if (now >= last) {
          done = true;
          break;
        }
        sequence.advance(a);
        read_history<T, N, kTaps>(a, sequence, channel, now, history);
      }
      take(x_ahead.row[j], dy_ahead.row[j], now < last);
      put_if_own(now - (kTaps - 1));
    }
  }
  // The walk reached the end of the last sequence: flush as at any other.
  if (!done && beyond == sequence.end) {
    for (int w = 0; w < kTaps - 1; ++w) put_if_own(beyond - (kTaps - 1) + w);
  }

  if constexpr (!kWeight) return;
  float* partial = a.partial + (static_cast<int64_t>(blockIdx.y) * a.channels + channel) * a.width;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int w = 0; w < kTaps; ++w) {
      const int tap = w - (kTaps - a.width);
      if (tap >= 0) partial[n * a.width + tap] = d_taps[w][n];
    }
  }
}

/// Input `token` of a sequence, counted from its begin; negative ones are in the initial state.
template <class T>
__device__ __forceinline__ float input_at(const Arguments& a, int sequence, int begin, int channel,
                                          int token) {
  if (token >= 0) {
    float value[1];
    read(static_cast<const T*>(a.x.data) + (begin + token) * a.x.outer_stride + channel, value);
    return value[0];
  }
  if (a.initial_state == nullptr) return 0;
  return state_at<T>(a.initial_state, a, sequence, channel, a.width - 1 + token);
}

/// One thread per sequence and channel.
template <class T>
__global__ void final_state_kernel(const __grid_constant__ Arguments a) {
  const int channel = blockIdx.x * kThreads + threadIdx.x, sequence = blockIdx.y;
  if (channel >= a.channels) return;
  const int begin = a.cu_seqlens[sequence], length = a.cu_seqlens[sequence + 1] - begin;
  for (int i = 0; i < a.width - 1; ++i) {
    set_state<T>(a.final_state, a, sequence, channel, i,
                 input_at<T>(a, sequence, begin, channel, length - (a.width - 1) + i));
  }
}

template <class T>
__global__ void grad_initial_state_kernel(const __grid_constant__ Arguments a) {
  const int channel = blockIdx.x * kThreads + threadIdx.x, sequence = blockIdx.y;
  if (channel >= a.channels) return;
  const int begin = a.cu_seqlens[sequence], length = a.cu_seqlens[sequence + 1] - begin;
  float taps[kCausalConv1dMostTaps][1], grad[kCausalConv1dMostTaps - 1] = {};
  read_taps<1, kCausalConv1dMostTaps>(a, channel, taps);
  const int unused = static_cast<int>(kCausalConv1dMostTaps) - a.width;
  // Outputs from width - 1 on see nothing of the state.
  for (int t = 0; t < min(a.width - 1, length); ++t) {
    float c = 0, out[1];
    for (int w = 0; w < a.width; ++w) {
      c += taps[unused + w][0] * input_at<T>(a, sequence, begin, channel, t - (a.width - 1) + w);
    }
    read(static_cast<const T*>(a.grad_y.data) + (begin + t) * a.grad_y.outer_stride + channel, out);
    const float s = sigmoid(c), dc = out[0] * s * (1.f + c * (1.f - s));
    for (int w = 0; t + w < a.width - 1; ++w) grad[t + w] += dc * taps[unused + w][0];
  }
  // A sequence shorter than the state passes the rest of it on.
  for (int i = 0; length + i < a.width - 1 && a.grad_final_state != nullptr; ++i) {
    grad[length + i] += state_at<T>(a.grad_final_state, a, sequence, channel, i);
  }
  for (int i = 0; i < a.width - 1; ++i) {
    set_state<T>(a.grad_initial_state, a, sequence, channel, i, grad[i]);
  }
}

Arguments arguments_of(const CausalConv1dShape& shape, const CausalConv1dInputs& in) {
  if (shape.width < 2 || shape.width > kCausalConv1dMostTaps) {
    throw std::invalid_argument("causal_conv1d: " + std::to_string(shape.width) +
                                " taps, the CUDA kernel takes 2 to " +
                                std::to_string(kCausalConv1dMostTaps));
  }
  Arguments a{};
  a.tokens = static_cast<int>(shape.tokens);
  a.channels = static_cast<int>(shape.channels);
  a.width = static_cast<int>(shape.width);
  a.sequences = static_cast<int>(shape.sequences);
  a.weight_type = shape.weight_type;
  a.x = in.x;
  a.weight = in.weight;
  a.cu_seqlens = in.cu_seqlens;
  a.initial_state = in.initial_state;
  return a;
}

/// Tiles along the tokens: `preferred` tokens each, fewer where the grid of `n` channels a thread
/// would not fill the device, more where it would be too tall.
int64_t tile_of(const CausalConv1dShape& shape, int64_t n, int64_t preferred) {
  constexpr int64_t kTallest = 65535, kFewestBlocks = 1024, kSmallest = 32;
  const int64_t wide = (shape.channels + kThreads * n - 1) / (kThreads * n);
  while (preferred > kSmallest && shape.tokens / preferred * wide < kFewestBlocks) preferred /= 2;
  return std::max(preferred, (shape.tokens + kTallest - 1) / kTallest);
}

dim3 grid_of(const CausalConv1dShape& shape, int64_t n, int64_t tile) {
  return dim3(static_cast<unsigned>((shape.channels + kThreads * n - 1) / (kThreads * n)),
              static_cast<unsigned>((shape.tokens + tile - 1) / tile));
}

dim3 state_grid(const CausalConv1dShape& shape) {
  return dim3(static_cast<unsigned>((shape.channels + kThreads - 1) / kThreads),
              static_cast<unsigned>(shape.sequences));
}

/// Four taps in wide accesses of kBytes, or anything else one element at a time.
template <int kBytes, class F>
void dispatch(const CausalConv1dShape& shape, bool wide, const F& f) {
  dispatch_access<kBytes>(shape.type, wide && shape.width == 4, [&](auto access) {
    constexpr int kTaps =
        decltype(access)::kWidth > 1 ? 4 : static_cast<int>(kCausalConv1dMostTaps);
    f(access, std::integral_constant<int, kTaps>());
  });
}

}  // namespace

void causal_conv1d_forward(const CausalConv1dShape& shape, const CausalConv1dInputs& in, void* y,
                           void* final_state, cudaStream_t stream) {
  Arguments a = arguments_of(shape, in);
  if (shape.channels == 0) return;
  a.y = y;
  a.final_state = final_state;
  const int64_t tile = tile_of(shape, 8, kForwardTile);
  a.tile = static_cast<int>(tile);
  if (shape.tokens > 0) {
    dispatch<16>(shape, aligned(in.x, shape.type, shape.channels, 16), [&](auto access, auto taps) {
      using T = typename decltype(access)::Type;
      constexpr int N = decltype(access)::kWidth;
      forward_kernel<T, N, decltype(taps)::value>
          <<<grid_of(shape, N, tile), kThreads, 0, stream>>>(a);
    });
    check_launch("causal_conv1d_forward");
  }
  if (final_state == nullptr || shape.sequences == 0) return;
  dispatch_access(shape.type, false, [&](auto access) {
    using T = typename decltype(access)::Type;
    final_state_kernel<T><<<state_grid(shape), kThreads, 0, stream>>>(a);
  });
  check_launch("causal_conv1d_forward: final state");
}

int64_t causal_conv1d_backward_workspace(const CausalConv1dShape& shape) {
  const int64_t tile = tile_of(shape, 4, kBackwardTile);
  return (shape.tokens + tile - 1) / tile * shape.channels * shape.width;
}

void causal_conv1d_backward(const CausalConv1dShape& shape, const CausalConv1dInputs& in,
                            const InputRows& grad_y, const void* grad_final_state, void* grad_x,
                            void* grad_weight, void* grad_initial_state, float* workspace,
                            cudaStream_t stream) {
  Arguments a = arguments_of(shape, in);
  if (shape.channels == 0) return;
  a.grad_y = grad_y;
  a.grad_final_state = grad_final_state;
  a.grad_x = grad_x;
  a.grad_initial_state = grad_initial_state;
  a.partial = workspace;
  const int64_t tile = tile_of(shape, 4, kBackwardTile);
  a.tile = static_cast<int>(tile);
  if (shape.tokens > 0) {
    const bool wide = aligned(in.x, shape.type, shape.channels, 8) &&
                      aligned(grad_y, shape.type, shape.channels, 8);
    // Half as wide as the forward: each channel holds twice the registers.
    dispatch<8>(shape, wide, [&](auto access, auto taps) {
      using T = typename decltype(access)::Type;
      constexpr int N = decltype(access)::kWidth;
      constexpr int kTaps = decltype(taps)::value;
      const auto kernel = grad_weight != nullptr ? backward_kernel<T, N, kTaps, true>
                                                 : backward_kernel<T, N, kTaps, false>;
      kernel<<<grid_of(shape, N, tile), kThreads, 0, stream>>>(a);
    });
    check_launch("causal_conv1d_backward");
  }
  const int64_t parts = (shape.tokens + tile - 1) / tile, taps = shape.channels * shape.width;
  if (grad_weight != nullptr)
    column_sum(workspace, parts, taps, grad_weight, shape.weight_type, stream);
  if (grad_initial_state == nullptr || shape.sequences == 0) return;
  dispatch_access(shape.type, false, [&](auto access) {
    using T = typename decltype(access)::Type;
    grad_initial_state_kernel<T><<<state_grid(shape), kThreads, 0, stream>>>(a);
  });
  check_launch("causal_conv1d_backward: initial state");
}

}  // namespace heddle::ops::cuda
