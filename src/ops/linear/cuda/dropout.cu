// A thread keeps its columns' share of the random bits over kRows rows: what is left per element
// are two 64-bit products.
#include "ops/linear/cuda/dropout.h"

#include "base/splitmix.h"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 128, kRows = 16;

template <class T, int N, bool kAdds>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const __grid_constant__ DropoutShape shape, const __grid_constant__ InputRows x,
                   const int64_t* tokens, const int64_t* features,
                   const __grid_constant__ OutputRows y) {
  const int64_t column = (blockIdx.y * int64_t{kThreads} + threadIdx.x) * N;
  if (column >= shape.width) return;
  uint64_t by_feature[N];
#pragma unroll
  for (int i = 0; i < N; ++i)
    by_feature[i] = (static_cast<uint64_t>(features[column + i]) + 1) * splitmix::kStride;
  const int64_t first = blockIdx.x * int64_t{kRows};
  const int64_t end = min(first + kRows, shape.rows);
#pragma unroll 2
  for (int64_t row = first; row < end; ++row) {
    const uint64_t by_token = static_cast<uint64_t>(tokens[row]) * splitmix::kMix2 + shape.key;
    T* out = static_cast<T*>(y.data) + row * y.outer_stride + column;
    float value[N];
    read(static_cast<const T*>(x.data) + row * x.outer_stride + column, value);
    float sum[N];
    if constexpr (kAdds) read(static_cast<const T*>(out), sum);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const auto bits = static_cast<uint32_t>(splitmix::mixed(by_token + by_feature[i]) >> 32);
      value[i] *= bits >= shape.threshold ? shape.kept : 0.f;
    }
    if constexpr (kAdds) {
      // Rounded before it is added, as two operators would.
      unpack(pack<T>(value), value);
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] += sum[i];
    }
    write(out, value);
  }
}

}  // namespace

void dropout(const DropoutShape& shape, const InputRows& x, const int64_t* tokens,
             const int64_t* features, const OutputRows& y, bool adds, cudaStream_t stream) {
  if (shape.rows == 0 || shape.width == 0) return;
  const auto fits = [&](const auto& rows) { return aligned(rows, shape.type, shape.width, 16); };
  dispatch_access(shape.type, fits(x) && fits(y), [&](auto access) {
    using T = typename decltype(access)::Type;
    constexpr int N = decltype(access)::kWidth;
    const dim3 blocks(static_cast<unsigned>((shape.rows + kRows - 1) / kRows),
                      static_cast<unsigned>((shape.width / N + kThreads - 1) / kThreads));
    if (adds) {
      dropout_kernel<T, N, true><<<blocks, kThreads, 0, stream>>>(shape, x, tokens, features, y);
    } else {
      dropout_kernel<T, N, false><<<blocks, kThreads, 0, stream>>>(shape, x, tokens, features, y);
    }
  });
  check_launch("dropout");
}

}  // namespace heddle::ops::cuda
