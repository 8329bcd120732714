// Accesses of up to 16 bytes a thread, and arithmetic in fp32 whatever the element type.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

using bf16 = __nv_bfloat16;

/// N elements as they lie in memory. Loaded first and unpacked later, so that several loads are in
/// flight in few registers.
template <class T, int N>
struct Packed {
  static constexpr int kBytes = static_cast<int>(sizeof(T)) * N;
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  uint32_t words[kBytes < 4 ? 1 : kBytes / 4];
};

template <int N, class T>
__device__ __forceinline__ Packed<T, N> load(const T* address) {
  Packed<T, N> result;
  if constexpr (result.kBytes == 16) {
    const uint4 v = *reinterpret_cast<const uint4*>(address);
    result.words[0] = v.x, result.words[1] = v.y, result.words[2] = v.z, result.words[3] = v.w;
  } else if constexpr (result.kBytes == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(address);
    result.words[0] = v.x, result.words[1] = v.y;
  } else if constexpr (result.kBytes == 4) {
    result.words[0] = *reinterpret_cast<const uint32_t*>(address);
  } else {
    result.words[0] = *reinterpret_cast<const uint16_t*>(address);
  }
  return result;
}

template <int N, class T>
__device__ __forceinline__ void store(T* address, const Packed<T, N>& value) {
  if constexpr (value.kBytes == 16) {
    *reinterpret_cast<uint4*>(address) =
        make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]);
  } else if constexpr (value.kBytes == 8) {
    *reinterpret_cast<uint2*>(address) = make_uint2(value.words[0], value.words[1]);
  } else if constexpr (value.kBytes == 4) {
    *reinterpret_cast<uint32_t*>(address) = value.words[0];
  } else {
    *reinterpret_cast<uint16_t*>(address) = static_cast<uint16_t>(value.words[0]);
  }
}

template <int N, class T>
__device__ __forceinline__ void unpack(const Packed<T, N>& value, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(value.words[i]);
    } else {
      const uint32_t word = value.words[i / 2];
      x[i] = __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    }
  }
}

template <class T, int N>
__device__ __forceinline__ Packed<T, N> pack(const float (&x)[N]) {
  Packed<T, N> result;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) result.words[i] = __float_as_uint(x[i]);
  } else if constexpr (N == 1) {
    result.words[0] = __bfloat16_as_ushort(__float2bfloat16_rn(x[0]));
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      result.words[i] = static_cast<uint32_t>(__bfloat16_as_ushort(pair.x)) |
                        static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
    }
  }
  return result;
}

template <int N, class T>
__device__ __forceinline__ void read(const T* address, float (&x)[N]) {
  unpack(load<N>(address), x);
}

template <int N, class T>
__device__ __forceinline__ void write(T* address, const float (&x)[N]) {
  store(address, pack<T>(x));
}

/// N elements of a vector whose type is known at run time only: weights, which are few.
template <int N>
__device__ __forceinline__ void read_weight(const void* weight, Element type, int64_t first,
                                            float (&x)[N]) {
  if (type == Element::kBFloat16) {
    read(static_cast<const bf16*>(weight) + first, x);
  } else if constexpr (N == 8) {
    float low[4], high[4];
    read(static_cast<const float*>(weight) + first, low);
    read(static_cast<const float*>(weight) + first + 4, high);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = low[i], x[i + 4] = high[i];
  } else {
    read(static_cast<const float*>(weight) + first, x);
  }
}

/// Division of numbers below 2^31 by one that is known at launch: a multiplication and a shift.
struct Divisor {
  uint32_t value = 1, multiplier = 1, shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : value(divisor) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    const uint64_t excess = (uint64_t{1} << shift) - divisor;
    multiplier = static_cast<uint32_t>((excess << 32) / divisor + 1);
  }
  __device__ __forceinline__ uint32_t divide(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
};

/// The type and the number of elements of one access.
template <class T, int N>
struct Access {
  using Type = T;
  static constexpr int kWidth = N;
};

/// Calls f(Access<...>()) with accesses of `bytes` where `wide`, of one element otherwise.
template <int kBytes = 16, class F>
void dispatch_access(Element type, bool wide, const F& f) {
  if (type == Element::kBFloat16) {
    wide ? f(Access<bf16, kBytes / 2>()) : f(Access<bf16, 1>());
  } else {
    wide ? f(Access<float, kBytes / 4>()) : f(Access<float, 1>());
  }
}

/// Whether rows of `width` elements may be read in accesses of `bytes`.
template <class Pointer>
bool aligned(const Rows<Pointer>& rows, Element type, int64_t width, int64_t bytes) {
  const int64_t elements = bytes / bytes_of(type);
  return reinterpret_cast<uintptr_t>(rows.data) % static_cast<uintptr_t>(bytes) == 0 &&
         width % elements == 0 && rows.outer_stride % elements == 0 &&
         rows.inner_stride % elements == 0;
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

__device__ __forceinline__ int64_t row_offset(int64_t outer_stride, int64_t inner_stride,
                                              uint32_t row, uint32_t inner) {
  if (inner == 1) return row * outer_stride;
  const uint32_t outer = row / inner;
  return outer * outer_stride + (row - outer * inner) * inner_stride;
}

template <class T, class Pointer>
__device__ __forceinline__ auto row_address(const Rows<Pointer>& rows, uint32_t row,
                                            uint32_t inner) {
  const int64_t offset = row_offset(rows.outer_stride, rows.inner_stride, row, inner);
  if constexpr (std::is_const_v<std::remove_pointer_t<Pointer>>) {
    return static_cast<const T*>(rows.data) + offset;
  } else {
    return static_cast<T*>(rows.data) + offset;
  }
}

}  // namespace heddle::ops::cuda
