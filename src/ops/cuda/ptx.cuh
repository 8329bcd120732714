// Thin wrappers of the PTX the kernels need: asynchronous copies, barriers, matrix loads and
// stores, and the swizzled shared-memory tile that both tensor-core paths read.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace heddle::ops::cuda {

using u32 = uint32_t;
using u64 = uint64_t;
using bf16 = __nv_bfloat16;

__device__ __forceinline__ u32 smem_u32(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

/// Copies 16 bytes to shared memory, or writes 16 zero bytes without touching src when !valid.
__device__ __forceinline__ void cp_async16(u32 dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/// Arrives at `bar` when all earlier copies of this thread have landed; counts as an expected
/// arrival.
__device__ __forceinline__ void cp_async_arrive(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

/// Orders this thread's ordinary shared-memory writes before later reads by wgmma.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void mbar_init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_arrive(u32 bar) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbar_wait(u32 bar, int phase) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(bar),
      "r"(phase)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\nmbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
      "@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(bar),
      "r"(phase)
      : "memory");
#endif
}
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// In a kernel launched by launch_after: until the kernels before it in the stream are over and
/// what they wrote can be read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Lets a kernel that launch_after puts after this one become resident beside it.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <int N>
__device__ __forceinline__ void set_max_registers_up() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N>
__device__ __forceinline__ void set_max_registers_down() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// Two floats to packed bf16, lo in the low half.
__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ u32 pack_f16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ float bf16_lo(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float bf16_hi(u32 x) { return __uint_as_float(x & 0xffff0000u); }

__device__ __forceinline__ void ldmatrix4(u32 (&r)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
__device__ __forceinline__ void ldmatrix4_trans(u32 (&r)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
__device__ __forceinline__ uint4 ld_shared16(u32 addr) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}
/// One 16-byte store; a plain one of a uint4 that was just put together can end as four of 4 bytes.
__device__ __forceinline__ void st_global16(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(p)), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ u32 ld_shared4(u32 addr) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
  return v;
}
__device__ __forceinline__ void st_shared4(u32 addr, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(addr), "r"(v) : "memory");
}

#if __CUDA_ARCH__ >= 900
/// Loads from the same place of the shared memory of another CTA of the cluster.
__device__ __forceinline__ float load_from(u32 address, u32 rank) {
  float v;
  asm volatile("{.reg .b32 t; mapa.shared::cluster.u32 t, %1, %2; ld.shared::cluster.f32 %0, [t];}"
               : "=f"(v)
               : "r"(address), "r"(rank)
               : "memory");
  return v;
}
__device__ __forceinline__ float4 load4_from(u32 address, u32 rank) {
  float4 v;
  asm volatile(
      "{.reg .b32 t; mapa.shared::cluster.u32 t, %4, %5; "
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [t];}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(address), "r"(rank)
      : "memory");
  return v;
}
#endif

// Bulk copies (sm_90): one thread moves a whole tile, the barrier counts bytes.
#if __CUDA_ARCH__ >= 900
#define HEDDLE_BULK_COPY(...) asm volatile(__VA_ARGS__)
#else
#define HEDDLE_BULK_COPY(...)
#endif
/// One arrival at `bar` that also announces `bytes` of bulk copies.
__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
  HEDDLE_BULK_COPY(
      "{.reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1;}" ::"r"(bar), "r"(bytes)
      : "memory");
}
/// 64 x 64 box at (row, column) of a tensor map, 128-byte swizzled: one column block of a tile.
__device__ __forceinline__ void bulk_load_box(u32 dst, const void* map, int column, int row,
                                              u32 bar) {
  HEDDLE_BULK_COPY(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
      "l"(map), "r"(column), "r"(row), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  HEDDLE_BULK_COPY(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void bulk_store_box(const void* map, int column, int row, u32 src) {
  HEDDLE_BULK_COPY(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(column), "r"(row), "r"(src)
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* dst, u32 src, u32 bytes) {
  HEDDLE_BULK_COPY("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
                   "r"(src), "r"(bytes)
                   : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  HEDDLE_BULK_COPY("cp.async.bulk.commit_group;" ::: "memory");
}
/// Until at most N groups of this thread still read shared memory.
template <int N>
__device__ __forceinline__ void bulk_wait_read() {
  HEDDLE_BULK_COPY("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void bulk_wait_all() {
  HEDDLE_BULK_COPY("cp.async.bulk.wait_group 0;" ::: "memory");
}
#undef HEDDLE_BULK_COPY

/// Byte address of element (r, c), c a multiple of 8, in a bf16 tile of `rows` rows: column blocks
/// of 64 (128 bytes a row), the 16-byte pieces of a row exchanged by XOR with row % 8. This is the
/// 128-byte swizzle that wgmma descriptors name, and ldmatrix reads it without bank conflicts.
__device__ __forceinline__ u32 tile_address(u32 base, int rows, int r, int c) {
  return base + (c >> 6) * rows * 128 + r * 128 + ((((c & 63) >> 3) ^ (r & 7)) << 4);
}

/// Stores a 16 x 16 accumulator block (A-fragment order) at rows r0.., columns c0.. of a tile.
__device__ __forceinline__ void store_fragment(u32 tile, int rows, int r0, int c0, int lane,
                                               const u32 (&f)[4]) {
#if __CUDA_ARCH__ >= 900
  int m = lane >> 3, r = lane & 7;
  u32 a = tile_address(tile, rows, r0 + (m & 1) * 8 + r, c0 + (m >> 1) * 8);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(f[0]),
               "r"(f[1]), "r"(f[2]), "r"(f[3])
               : "memory");
#else
#pragma unroll
  for (int m = 0; m < 4; ++m)
    st_shared4(tile_address(tile, rows, r0 + (m & 1) * 8 + (lane >> 2), c0 + (m >> 1) * 8) +
                   (lane & 3) * 4,
               f[m]);
#endif
}

/// Stores the transpose of a 16 x 16 block: fragment row i, column j goes to tile row r0 + j,
/// column c0 + i.
__device__ __forceinline__ void store_fragment_trans(u32 tile, int rows, int r0, int c0, int lane,
                                                     const u32 (&f)[4]) {
#if __CUDA_ARCH__ >= 900
  int m = lane >> 3, r = lane & 7;
  u32 a = tile_address(tile, rows, r0 + (m >> 1) * 8 + r, c0 + (m & 1) * 8);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a),
               "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3])
               : "memory");
#else
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    u32 t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(f[m]));
    st_shared4(tile_address(tile, rows, r0 + (m >> 1) * 8 + (lane >> 2), c0 + (m & 1) * 8) +
                   (lane & 3) * 4,
               t);
  }
#endif
}

/// Loads the transpose of tile rows r0..r0+15, columns c0..c0+15 as an A fragment (rows = columns).
__device__ __forceinline__ void load_fragment_trans(u32 (&f)[4], u32 tile, int rows, int r0, int c0,
                                                    int lane) {
  int m = lane >> 3, r = lane & 7;
  ldmatrix4_trans(f, tile_address(tile, rows, r0 + (m >> 1) * 8 + r, c0 + (m & 1) * 8));
}

/// Starts the copy of a 64 x COLS tile by THREADS threads; rows from `valid` on become zero.
template <int COLS, int THREADS = 128>
__device__ __forceinline__ void load_tile_async(u32 tile, const bf16* src, int64_t row_stride,
                                                int valid, int tid) {
  constexpr int kPerRow = COLS / 8, kRows = THREADS / kPerRow;
  int r = tid / kPerRow, c = (tid % kPerRow) * 8;
  const bf16* p = src + r * row_stride + c;
  int64_t step = kRows * row_stride;
  if constexpr (kRows % 8 == 0) {  // the swizzle of a thread's rows is always the same
    u32 dst = tile_address(tile, 64, r, c);
#pragma unroll 2  // few addresses alive at once: the load group has few registers
    for (int i = 0; i < 64 / kRows; ++i) {
      cp_async16(dst, p, r < valid);
      dst += kRows * 128;
      r += kRows;
      p += step;
    }
  } else {
#pragma unroll 2
    for (int i = 0; i < 64 / kRows; ++i) {
      cp_async16(tile_address(tile, 64, r, c), p, r < valid);
      r += kRows;
      p += step;
    }
  }
}

/// Writes rows [0, valid) of a 64 x COLS tile to global memory with THREADS threads.
template <int COLS, int THREADS = 128>
__device__ __forceinline__ void store_tile(bf16* dst, u32 tile, int64_t row_stride, int valid,
                                           int tid) {
  constexpr int kPerRow = COLS / 8, kRows = THREADS / kPerRow;
  int r = tid / kPerRow, c = (tid % kPerRow) * 8;
  bf16* p = dst + r * row_stride + c;
  int64_t step = kRows * row_stride;
#pragma unroll 2
  for (int i = 0; i < 64 / kRows; ++i) {
    if (r < valid) *reinterpret_cast<uint4*>(p) = ld_shared16(tile_address(tile, 64, r, c));
    r += kRows;
    p += step;
  }
}

/// Copies `BYTES` of an already swizzled tile image with THREADS threads.
template <int BYTES, int THREADS = 128>
__device__ __forceinline__ void load_image_async(u32 tile, const bf16* src, int tid) {
#pragma unroll 4
  for (int i = 0; i < BYTES / (THREADS * 16); ++i)
    cp_async16(tile + (i * THREADS + tid) * 16, src + (i * THREADS + tid) * 8, true);
}
template <int BYTES>
__device__ __forceinline__ void store_image(bf16* dst, u32 tile, int tid) {
#pragma unroll
  for (int i = 0; i < BYTES / 2048; ++i)
    *reinterpret_cast<uint4*>(dst + i * 1024 + tid * 8) = ld_shared16(tile + i * 2048 + tid * 16);
}

}  // namespace heddle::ops::cuda
