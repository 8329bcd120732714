// Rows: a warp or four for each, which hold it in registers between its largest magnitude and its
// values. Columns: their largest magnitudes first, then tiles through shared memory, from the
// cache.
#include "ops/linear/cuda/fp8_rows.h"

#include <algorithm>

#include "ops/cuda/fp8.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 256, kWidth = 8;

/// The largest of kWarps warps; all of the block's threads take part.
template <int kWarps>
__device__ __forceinline__ float row_largest(float x) {
  x = warp_largest(x);
  if constexpr (kWarps == 1) {
    return x;
  } else {
    __shared__ float found[kThreads / 32];
    const int warp = threadIdx.x / 32, first = warp / kWarps * kWarps;
    if (threadIdx.x % 32 == 0) found[warp] = x;
    __syncthreads();
    x = found[first];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) x = fmaxf(x, found[first + i]);
    return x;
  }
}

/// The rest of rows wider than what is held is read once more.
template <int kWarps, int kHeld>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const bf16* x, int64_t rows, int64_t columns, int64_t stride, uint8_t* y,
                float* scales) {
  constexpr int kRowThreads = kWarps * 32, kStep = kRowThreads * kWidth;
  const int64_t wanted = int64_t{blockIdx.x} * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  const int64_t row = min(wanted, rows - 1);
  const bf16* source = x + row * stride;
  const int64_t first = (threadIdx.x % kRowThreads) * kWidth;
  Packed<bf16, kWidth> held[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k)
    if (first + k * kStep < columns) held[k] = load<kWidth>(source + first + k * kStep);
  float largest = 0.f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k)
    if (first + k * kStep < columns) largest = fmaxf(largest, largest_of(held[k]));
  for (int64_t i = first + kHeld * kStep; i < columns; i += kStep)
    largest = fmaxf(largest, largest_of(load<kWidth>(source + i)));
  const float scale = fp8_scale(row_largest<kWarps>(largest)), inverse = 1.f / scale;
  if (wanted >= rows) return;
  if (first == 0) scales[row] = scale;
  const auto put = [&](int64_t i, const Packed<bf16, kWidth>& packed) {
    float v[kWidth];
    unpack<kWidth, bf16>(packed, v);
    *reinterpret_cast<uint2*>(y + row * columns + i) = fp8_of(v, inverse);
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k)
    if (first + k * kStep < columns) put(first + k * kStep, held[k]);
  for (int64_t i = first + kHeld * kStep; i < columns; i += kStep) put(i, load<kWidth>(source + i));
}

constexpr int kTileColumns = 64, kTileRows = 128, kStripe = 4 * kTileRows;
constexpr int kPieces = kTileColumns / kWidth;

/// Magnitudes are not negative: they are ordered as their bits are, whatever the order of CTAs.
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const bf16* x, int rows, int columns, int64_t stride, unsigned* largest) {
  __shared__ unsigned found[kTileColumns];
  const int piece = threadIdx.x % kPieces, column = blockIdx.x * kTileColumns + piece * kWidth;
  if (threadIdx.x < kTileColumns) found[threadIdx.x] = 0;
  __syncthreads();
  float most[kWidth] = {};
  if (column < columns) {
    const int last = min(rows, static_cast<int>(blockIdx.y + 1) * kStripe);
#pragma unroll 4
    for (int row = blockIdx.y * kStripe + threadIdx.x / kPieces; row < last;
         row += kThreads / kPieces) {
      float v[kWidth];
      unpack<kWidth, bf16>(load<kWidth>(x + row * stride + column), v);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) most[i] = fmaxf(most[i], fabsf(v[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    float m = most[i];
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 8));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 16));
    if (threadIdx.x % 32 < kPieces) atomicMax(&found[piece * kWidth + i], __float_as_uint(m));
  }
  __syncthreads();
  const int mine = blockIdx.x * kTileColumns + threadIdx.x;
  if (threadIdx.x < kTileColumns && mine < columns) atomicMax(&largest[mine], found[threadIdx.x]);
}

__global__ void __launch_bounds__(kThreads)
    turn_kernel(const bf16* x, int rows, int columns, int64_t stride, const float* largest,
                uint8_t* y, float* scales) {
  constexpr int kGroups = kTileRows / 4;
  __shared__ float scale[kTileColumns];
  __shared__ uint32_t tile[kTileColumns][kGroups + 1];  // four rows of a column in one
  const int first_column = blockIdx.x * kTileColumns, first_row = blockIdx.y * kTileRows;
  if (threadIdx.x < kTileColumns) {
    const int column = first_column + threadIdx.x;
    scale[threadIdx.x] = column < columns ? fp8_scale(largest[column]) : 1.f;
    if (blockIdx.y == 0 && column < columns) scales[column] = scale[threadIdx.x];
  }
  __syncthreads();
  const int piece = threadIdx.x % kPieces, group = threadIdx.x / kPieces;
  const int column = first_column + piece * kWidth, row = first_row + group * 4;
  float v[4][kWidth] = {};
  if (column < columns && row < rows) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      unpack<kWidth, bf16>(load<kWidth>(x + (row + r) * stride + column), v[r]);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float inverse = 1.f / scale[piece * kWidth + i];
    tile[piece * kWidth + i][group] = fp8_pair(v[0][i] * inverse, v[1][i] * inverse) |
                                      fp8_pair(v[2][i] * inverse, v[3][i] * inverse) << 16;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int c = threadIdx.x / 32; c < kTileColumns; c += kThreads / 32) {
    if (first_column + c >= columns || first_row + lane * 4 >= rows) continue;
    *reinterpret_cast<uint32_t*>(y + int64_t{first_column + c} * rows + first_row + lane * 4) =
        tile[c][lane];
  }
}

unsigned parts(int64_t whole, int64_t part) {
  return static_cast<unsigned>((whole + part - 1) / part);
}

}  // namespace

void fp8_rows(const void* x, int64_t rows, int64_t columns, int64_t stride, void* y, float* scales,
              cudaStream_t stream) {
  if (rows == 0) return;
  const auto run = [&](auto kernel, int warps) {
    kernel<<<parts(rows * warps, kThreads / 32), kThreads, 0, stream>>>(
        static_cast<const bf16*>(x), rows, columns, stride, static_cast<uint8_t*>(y), scales);
  };
  if (columns <= 1024) {
    run(rows_kernel<1, 4>, 1);
  } else if (columns <= 2048) {
    run(rows_kernel<2, 4>, 2);
  } else if (columns <= 4096) {
    run(rows_kernel<4, 4>, 4);
  } else {
    run(rows_kernel<8, 5>, 8);
  }
  check_launch("fp8_rows");
}

void fp8_columns(const void* x, int64_t rows, int64_t columns, int64_t stride, void* y,
                 float* scales, float* largest, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return;
  const auto r = static_cast<int>(rows), c = static_cast<int>(columns);
  const auto source = static_cast<const bf16*>(x);
  cudaMemsetAsync(largest, 0, sizeof(float) * static_cast<std::size_t>(columns), stream);
  largest_kernel<<<dim3(parts(columns, kTileColumns), parts(rows, kStripe)), kThreads, 0, stream>>>(
      source, r, c, stride, reinterpret_cast<unsigned*>(largest));
  check_launch("fp8_columns, largest");
  turn_kernel<<<dim3(parts(columns, kTileColumns), parts(rows, kTileRows)), kThreads, 0, stream>>>(
      source, r, c, stride, largest, static_cast<uint8_t*>(y), scales);
  check_launch("fp8_columns");
}

}  // namespace heddle::ops::cuda
