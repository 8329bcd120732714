#include "ops/attention/cuda/packed_backward.h"

#include "ops/attention/cuda/packed_tiles.cuh"
#include "ops/cuda/element.h"
#include "ops/cuda/tensor_map.h"

namespace heddle::ops::cuda {
namespace packed {
namespace {

/// delta = sum over a head of o * d_o, a warp a row.
__global__ void __launch_bounds__(256)
    deltas(const uint4* o, const uint4* d_o, float* delta, int64_t rows) {
  const int64_t row = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  const int64_t i = row * 32 + threadIdx.x % 32;
  const uint4 x = o[i], y = d_o[i];
  const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    sum += bf16_lo(xs[j]) * bf16_lo(ys[j]) + bf16_hi(xs[j]) * bf16_hi(ys[j]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 == 0) delta[row] = sum;
}

/// The tiles of `rows` tokens of all sequences: the longest sequences first, so that none of them
/// is begun last, the tiles of one together, as they read the same. A warp takes a sequence; after
/// the last one stands -1. The two CTAs write the lists of the two kernels.
__global__ void __launch_bounds__(1024)
    list_work(const int32_t* cu_seqlens, int sequences, int entries, int pairs, int2* work) {
  const int rows = kRows << blockIdx.x, lane = threadIdx.x % 32;
  if (blockIdx.x == 1) work += entries, entries = pairs;
  const auto tiles_of = [&](int s) {
    return (cu_seqlens[s + 1] - cu_seqlens[s] + rows - 1) / rows;
  };
  for (int s = threadIdx.x / 32; s <= sequences; s += blockDim.x / 32) {
    const int own = s < sequences ? tiles_of(s) : 0;
    int place = 0;
    for (int other = lane; other < sequences; other += 32) {
      const int tiles = tiles_of(other);
      if (tiles > own || (tiles == own && other < s)) place += tiles;
    }
    place = __reduce_add_sync(0xffffffffu, place);
    for (int i = lane; i < (s < sequences ? own : entries - place); i += 32)
      work[place + i] = s < sequences ? int2{s, i} : int2{-1, 0};
  }
}

}  // namespace
}  // namespace packed

void packed_backward(const PackedBackwardShape& shape, const PackedBackwardTensors& t,
                     cudaStream_t stream) {
  using namespace packed;
  const int64_t q_width = shape.q_heads * kDim, k_width = shape.k_heads * kDim;
  auto* work = reinterpret_cast<int2*>(t.work);
  Args a = {tensor_map(t.q, shape.tokens, q_width, q_width, kRows),
            tensor_map(t.k, shape.tokens, k_width, shape.k_stride, kRows),
            tensor_map(t.v, shape.tokens, k_width, shape.v_stride, kRows),
            tensor_map(t.d_o, shape.tokens, q_width, q_width, kRows),
            t.lse,
            t.delta,
            t.cu_seqlens,
            work,
            static_cast<bf16*>(t.dq),
            static_cast<bf16*>(t.dk),
            static_cast<bf16*>(t.dv),
            static_cast<int>(shape.q_heads),
            static_cast<int>(shape.k_heads),
            static_cast<float>(shape.scale)};
  const auto tiles = static_cast<unsigned>(shape.tiles()),
             pairs = static_cast<unsigned>(shape.pairs());
  list_work<<<2, 1024, 0, stream>>>(t.cu_seqlens, static_cast<int>(shape.sequences),
                                    static_cast<int>(tiles), static_cast<int>(pairs), work);
  const int64_t rows = shape.delta_floats();
  deltas<<<static_cast<unsigned>((rows + 7) / 8), 256, 0, stream>>>(
      static_cast<const uint4*>(t.o), static_cast<const uint4*>(t.d_o), t.delta, rows);
  launch_key_gradients(a, tiles, stream);
  a.work += tiles;
  launch_query_gradients(a, pairs, stream);
  check_launch("packed_backward");
}

}  // namespace heddle::ops::cuda
