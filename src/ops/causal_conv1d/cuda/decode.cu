// One thread per sequence and channel: a channel's history is a few bytes, neighbouring threads
// read neighbouring ones.
#include "ops/causal_conv1d/cuda/decode.h"

#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const __grid_constant__ ConvDecodeArguments a) {
  const int channel = blockIdx.x * kThreads + threadIdx.x, row = blockIdx.y;
  if (channel >= a.channels) return;
  const int kept = a.width - 1;
  T* const history = static_cast<T*>(a.states) +
                     (a.slots[row] * a.channels + channel) * static_cast<int64_t>(kept);
  const int64_t taps = static_cast<int64_t>(channel) * a.width;
  const auto tap = [&](int w) {
    float value[1];
    read_weight(a.weight, a.weight_type, taps + w, value);
    return value[0];
  };
  const auto now = load<1>(static_cast<const T*>(a.x.data) + row * a.x.outer_stride + channel);
  float value[1];
  unpack(now, value);
  float c = tap(kept) * value[0];
  for (int w = 0; w < kept; ++w) {
    const auto before = load<1>(history + w);
    unpack(before, value);
    c += tap(w) * value[0];
    if (w > 0) store(history + w - 1, before);
  }
  store(history + kept - 1, now);
  const float out[1] = {c * sigmoid(c)};
  write(static_cast<T*>(a.y) + static_cast<int64_t>(row) * a.channels + channel, out);
}

}  // namespace

void conv_decode(const ConvDecodeArguments& a, cudaStream_t stream) {
  if (a.batch == 0 || a.channels == 0) return;
  const dim3 grid(static_cast<unsigned>((a.channels + kThreads - 1) / kThreads),
                  static_cast<unsigned>(a.batch));
  dispatch_access(a.type, false, [&](auto access) {
    decode_kernel<typename decltype(access)::Type><<<grid, kThreads, 0, stream>>>(a);
  });
  check_launch("conv_decode");
}

}  // namespace heddle::ops::cuda
