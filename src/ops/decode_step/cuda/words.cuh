// Vectors of bf16 that CTAs of one kernel hand to each other through global memory, without a
// barrier: a word holds two numbers and says by itself of which round it is.
#pragma once

#include "ops/cuda/ptx.cuh"

namespace heddle::ops::cuda::decode {

/// Numbers are stored times 2^-64. Then the highest bit of the exponent of any number below 2^65
/// is 0, and this bit of the word's second number is free to hold the round's lowest bit.
constexpr u32 kRoundBit = 1u << 30;
constexpr float kStored = 0x1p-64f, kRead = 0x1p64f;
/// Numbers beyond it do not fit: words of them are clamped, as those of NaN are.
constexpr float kLargest = 0x1p64f;
/// A deadlock ends the program, after most of a minute: tools that look at each access are slow.
constexpr int kMostLooks = 1 << 26;
/// By a store to nowhere: a kernel with a trap in it gets no more registers from the compiler than
/// it starts with, and spills.
__device__ __forceinline__ void give_up() {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(u64{0}), "r"(0) : "memory");
}

__device__ __forceinline__ u32 make_word(float lo, float hi, u32 round) {
  u32 word;
  // The sign of the first and the smaller size; of NaN and a number the number.
  asm("{.reg .b32 v; mul.rn.bf16x2 v, %1, %2; min.xorsign.abs.bf16x2 %0, v, %3;}"
      : "=r"(word)
      : "r"(pack_bf16(lo, hi)), "r"(0x1f801f80u),  // 2^-64
        "r"(0x3fff3fffu));                         // the largest bf16 below 2
  return word | (round & 1) << 30;
}
/// A word of one float, clamped likewise.
__device__ __forceinline__ u32 make_word(float x, u32 round) {
  u32 word;
  asm("min.xorsign.abs.f32 %0, %1, %2;"
      : "=r"(word)
      : "f"(x * kStored), "f"(__uint_as_float(0x3fffffffu)));  // the largest float below 2
  return word | (round & 1) << 30;
}
__device__ __forceinline__ float float_of(u32 word) { return __uint_as_float(word) * kRead; }
/// The two numbers of a word whose round's bit is 0, as bf16.
__device__ __forceinline__ u32 read_pair(u32 word) {
  u32 pair;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(word), "r"(0x5f805f80u));  // 2^64
  return pair;
}
__device__ __forceinline__ void store_word(u32* to, u32 word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_words(u32* to, u32 first, u32 second) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(first), "r"(second)
               : "memory");
}
__device__ __forceinline__ void load_words(uint4& v, const u32* p) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
}
__device__ __forceinline__ void load_words(uint2& v, const u32* p) {
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p)
               : "memory");
}
__device__ __forceinline__ void load_words(u32& v, const u32* p) {
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
}
__device__ __forceinline__ u32 differing(u32 v, u32 bit) { return (v ^ bit) & kRoundBit; }
__device__ __forceinline__ u32 differing(const uint2& v, u32 bit) {
  return ((v.x ^ bit) | (v.y ^ bit)) & kRoundBit;
}
__device__ __forceinline__ u32 differing(const uint4& v, u32 bit) {
  return ((v.x ^ bit) | (v.y ^ bit) | (v.z ^ bit) | (v.w ^ bit)) & kRoundBit;
}
__device__ __forceinline__ void clear(u32& v) { v &= ~kRoundBit; }
__device__ __forceinline__ void clear(uint2& v) { v.x &= ~kRoundBit, v.y &= ~kRoundBit; }
__device__ __forceinline__ void clear(uint4& v) {
  v.x &= ~kRoundBit, v.y &= ~kRoundBit, v.z &= ~kRoundBit, v.w &= ~kRoundBit;
}

__device__ __forceinline__ void fill(u32& v, u32 word) { v = word; }
__device__ __forceinline__ void fill(uint2& v, u32 word) { v = make_uint2(word, word); }

/// Loads those of N vectors at base + offset(i) that are not of the round; whether one was not.
template <int N, class T, class Offset>
__device__ __forceinline__ bool look(T (&v)[N], const u32* base, u32 bit, const Offset& offset) {
  u32 bad = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const u32 differs = differing(v[i], bit);
    if (differs) load_words(v[i], base + offset(i));
    bad |= differs;
  }
  return bad != 0;
}

/// Loads N vectors at base + offset(i) again and again until all are of the round.
template <int N, class T, class Offset>
__device__ __forceinline__ void await_words(T (&v)[N], const u32* base, u32 round,
                                            const Offset& offset) {
  const u32 bit = (round & 1) << 30;
#pragma unroll
  for (int i = 0; i < N; ++i) load_words(v[i], base + offset(i));
#pragma unroll 1
  for (int looks = 0; look(v, base, bit, offset); ++looks) {
    if (looks > kMostLooks) give_up();
  }
#pragma unroll
  for (int i = 0; i < N; ++i) clear(v[i]);
}

/// Waits for two kinds of vectors at once; one with an offset below 0 is not wanted, and is 0.
template <int N, class T, class Offset, int M, class U, class Other>
__device__ __forceinline__ void await_both(T (&v)[N], const u32* base, const Offset& offset,
                                           U (&w)[M], const u32* other_base, const Other& other,
                                           u32 round) {
  const u32 bit = (round & 1) << 30;
#pragma unroll
  for (int i = 0; i < N; ++i) fill(v[i], offset(i) < 0 ? bit : ~bit);
#pragma unroll
  for (int i = 0; i < M; ++i) fill(w[i], other(i) < 0 ? bit : ~bit);
#pragma unroll 1
  for (int looks = 0;; ++looks) {
    const bool first = look(v, base, bit, offset), second = look(w, other_base, bit, other);
    if (!first && !second) break;
    if (looks > kMostLooks) give_up();
  }
#pragma unroll
  for (int i = 0; i < N; ++i) clear(v[i]);
#pragma unroll
  for (int i = 0; i < M; ++i) clear(w[i]);
}

}  // namespace heddle::ops::cuda::decode
