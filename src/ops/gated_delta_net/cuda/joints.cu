// States at the joints of split sequences. Per segment, all at once: S_ext, the state it leaves
// when it starts from zero, and its transition M; then, joint after joint, S <- M S + S_ext
// (docs/gdn.md, "Several segments at once").
#include "serial.cuh"

namespace heddle::ops::cuda::gdn {
namespace {

__device__ __forceinline__ u32 to_tf32(float x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

template <class M, int D>
struct EndsSmem {
  static constexpr int kStages = kStagesOf<M, D>;
  static constexpr u32 kWide = 64 * D * 2;
  static constexpr u32 kStage = kWide + 2 * 8192;  // K, V, T
  static constexpr u32 kScales = kStages * kStage;
  static constexpr u32 kBarriers = kScales + kStages * sizeof(SolveScales);
  static constexpr u32 kBytes = kBarriers + 64;
};

/// CTA = (segment, value head, 64 columns of [V | I]): the columns of V start from zero (those of a
/// sequence's first segment from its initial state), those of I from the unit matrix, with V = 0,
/// and end as columns of M. Chunks whose effect has decayed by the end are left out; segments are
/// the fast axis of the grid, which spreads the CTAs of a head that forgets little. One state
/// group, per chunk, transposed: X = S K^T, U = (V - X e^G) T'^T beta, S = e^{G_C} S + (U
/// e^{G_C-G}) K. One load group.
///
/// Shared memory (D = 128): 3 x (K 16, V 8, T 8) + scales 6 = 102 KB; two CTAs an SM.
///
/// Barriers: full[stage], empty[stage].
template <class M, int D>
__global__ void __launch_bounds__(256, M::kHopper ? 2 : 1)
    ends_kernel(const __grid_constant__ Args a) {
  using Smem = EndsSmem<M, D>;
  constexpr int KS = D / 16, NB = D / 8, kStages = Smem::kStages, L = kLoaders<M>;
  extern __shared__ __align__(1024) uint8_t smem[];
  u32 base = smem_u32(smem);
  SolveScales* scales = reinterpret_cast<SolveScales*>(smem + Smem::kScales);
  u32 full = base + Smem::kBarriers, empty = full + kStages * 8;
  int group = threadIdx.x >> 7, tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
  wait_for_previous_kernel();
  start_next_kernel();
  Work w(a, blockIdx.x, blockIdx.y, 2 * D / 64, 64);
  if (w.sequence < 0 || w.exit < 0) return;
  bool unit = w.v0 >= D;
  if (unit && w.entry < 0) return;
  Reach reach(a, w, /*from_end=*/true, lane);
  if (w.v0 == D && threadIdx.x == 0) a.carries[w.entry * a.v_heads + w.h] = reach.across;
  if (unit && !reach.across) return;
  w.keep_last(reach.chunks);
  if (unit) w.v0 -= D;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(full + i * 8, L);
      mbar_init(empty + i * 8, 128);
    }
    fence_async_proxy();  // bulk copies see them
  }
  if (unit)
    for (int i = threadIdx.x; i < kStages * 512; i += 256)
      *reinterpret_cast<uint4*>(smem + i / 512 * Smem::kStage + Smem::kWide + i % 512 * 16) =
          make_uint4(0, 0, 0, 0);
  __syncthreads();

  if (group == 1) {
    if constexpr (M::kHopper) set_max_registers_down<48>();
    if (tid >= L) return;
    ScaleRows<L, false> rows;  // of the next chunk to load
    if (w.chunks > 0) rows.load(a, w.first_chunk, w.h, w.hk, tid);
    for (int c = 0; c < w.chunks; ++c) {
      int s = c % kStages;
      if (c >= kStages) mbar_wait(empty + s * 8, (c / kStages - 1) & 1);
      rows.store(scales[s], tid);
      if (c + 1 < w.chunks) rows.load(a, w.first_chunk + c + 1, w.h, w.hk, tid);
      load_stage<M, D, 1, false>(a, w, c, base + s * Smem::kStage, full + s * 8, kMapV,
                                 unit ? nullptr : a.v, a.v_stride, tid);
    }
    cp_async_wait<0>();
    return;
  }

  if constexpr (M::kHopper) set_max_registers_up<208>();
  float s[NB][4];
  load_state(s, w.entry < 0 && reach.across ? w.state(a, -1, nullptr, a.initial_state, D) : nullptr,
             D, w.v0, warp, lane);
  if (unit) {
    int row = w.v0 + warp * 16 + (lane >> 2), column = (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < NB; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[n][e] = row + (e >> 1) * 8 == n * 8 + column + (e & 1) ? 1.f : 0.f;
  }
  for (int c = 0; c < w.chunks; ++c) {
    int stage = c % kStages;
    u32 k = base + stage * Smem::kStage, v = k + Smem::kWide, t = v + 8192;
    const SolveScales& sc = scales[stage];
    u32 sb[KS][4], f[4][4], us[4][4];
    float x[8][4];
    to_fragments(sb, s);
    wait_filled(full + stage * 8, (c / kStages) & 1, !M::kHopper || w.valid(c) < kChunk);
    M::fence();
    M::template rs<false>(x, sb, k, false);
    M::commit();
    M::template wait<0>();
    pin(x);
    pin(sb);
    residual_fragments(f, x, v, sc.read_k, warp, lane);
    M::fence();
    M::template rs<false>(x, f, t, false);
    M::commit();
    scale(s, sc.carry);
    M::template wait<0>();
    pin(x);
    pin(f);
    to_fragments(f, x, sc.beta, lane);
    scale_fragments(us, f, sc.write, lane);
    pin(s);
    M::fence();
    M::template rs<true>(s, us, k, true);
    M::commit();
    M::template wait<0>();
    pin(s);
    pin(us);
    mbar_arrive(empty + stage * 8);
  }
  if (unit) {  // as the join multiplies it
#pragma unroll
    for (int n = 0; n < NB; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = __uint_as_float(to_tf32(s[n][e]));
  }
  float* out = unit ? a.transitions + (int64_t{w.entry} * a.v_heads + w.h) * D * D
                    : w.state<float>(a, w.exit, a.joint_states, nullptr, D);
  save_state(s, out, D, w.v0, warp, lane);
}

__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// 16 rows of M (kReverse: of M^T) from `row` on as mma operands. The contraction's order is free,
/// so lane l takes columns 16 n + 4 (l % 4) .. + 3, one 16-byte load for two steps of 8.
template <int D, bool kReverse>
__device__ __forceinline__ void load_transition(u32 (&m)[D / 16][2][4], const float* src, int row,
                                                int lane) {
#pragma unroll
  for (int n = 0; n < D / 16; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int i = row + (lane >> 2) + r * 8, k = n * 16 + (lane & 3) * 4;
      if constexpr (kReverse) {
#pragma unroll
        for (int e = 0; e < 4; ++e) m[n][r][e] = __float_as_uint(src[(k + e) * D + i]);
      } else {
        uint4 x = *reinterpret_cast<const uint4*>(src + i * D + k);
        m[n][r][0] = x.x;
        m[n][r][1] = x.y;
        m[n][r][2] = x.z;
        m[n][r][3] = x.w;
      }
    }
}

constexpr int kColumns = 16;  // of V, in a CTA of the join

/// CTA = (sequence, value head, kColumns columns of V); a warp owns 16 rows of the state. From the
/// first joint on S_next += M S, kReverse: from the last joint back dS_before += M^T dS, in tf32 (a
/// chunk's own product rounds S to bf16). What the next step reads is fetched while this one
/// multiplies.
///
/// Shared memory: S in tf32, twice, padded so that the 32 lanes' reads meet 32 banks.
template <int D, bool kReverse>
__global__ void __launch_bounds__(2 * D, 1)
    join_kernel(const __grid_constant__ Args a, float* states) {
  constexpr int kPitch = kColumns + 2, kTiles = kColumns / 8;
  __shared__ u32 buffers[2][D * kPitch];
  if constexpr (!kReverse) {
    wait_for_previous_kernel();
    start_next_kernel();
  }
  int h = blockIdx.x / (D / kColumns), v0 = blockIdx.x % (D / kColumns) * kColumns;
  int tid = threadIdx.x, lane = tid & 31, row = (tid >> 5) * 16;
  int begin = a.first_segment[blockIdx.y] - blockIdx.y;
  int steps = a.first_segment[blockIdx.y + 1] - blockIdx.y - 1 - begin - 1;  // joints less one
  if (steps <= 0) return;
  // Step i crosses the segment between joints j = joint(i) and j + 1.
  auto joint = [&](int i) { return begin + (kReverse ? steps - 1 - i : i); };
  auto carries = [&](int i) { return i < steps ? a.carries[joint(i) * a.v_heads + h] : 0; };
  auto state = [&](int j) { return states + (int64_t{j} * a.v_heads + h) * D * D + v0; };
  auto target = [&](int i) {
    return state(joint(i) + (kReverse ? 0 : 1)) + (row + (lane >> 2)) * D + (lane & 3) * 2;
  };
  u32 m[D / 16][2][4], next_m[D / 16][2][4];
  float acc[kTiles][4], next[kTiles][4];
  auto fetch = [&](int i) {
    const float* to = target(i);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      *reinterpret_cast<float2*>(next[n]) = *reinterpret_cast<const float2*>(to + n * 8);
      *reinterpret_cast<float2*>(next[n] + 2) =
          *reinterpret_cast<const float2*>(to + 8 * D + n * 8);
    }
    load_transition<D, kReverse>(
        next_m, a.transitions + (int64_t{joint(i)} * a.v_heads + h) * D * D, row, lane);
  };
  bool held = false;                         // the buffer of this step has its state
  int now = carries(0), after = carries(1);  // fetched two steps ahead, tested when needed
  if (now) fetch(0);
  for (int i = 0; i < steps; ++i) {
    int later = carries(i + 2);
    u32 *s = buffers[i & 1], *s_next = buffers[~i & 1];
    if (now) {
#pragma unroll
      for (int n = 0; n < D / 16; ++n)
#pragma unroll
        for (int e = 0; e < 8; ++e) m[n][e >> 2][e & 3] = next_m[n][e >> 2][e & 3];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[n][e] = next[n][e];
      if (!held) {
        const float* from = state(joint(i) + (kReverse ? 1 : 0));
        for (int e = tid; e < D * kColumns; e += 2 * D)
          s[e / kColumns * kPitch + e % kColumns] = to_tf32(from[e / kColumns * D + e % kColumns]);
      }
    }
    if (after) fetch(i + 1);
    __syncthreads();
    if (now) {
      float odd[kTiles][4];  // a second sum, since each product waits for the one before
      zero(odd);
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const u32 f[4] = {m[k][0][e], m[k][1][e], m[k][0][e + 1], m[k][1][e + 1]};
          const u32* b = s + (k * 16 + (lane & 3) * 4 + e) * kPitch + (lane >> 2);
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
            mma_tf32(e == 0 ? acc[n] : odd[n], f, b[n * 8], b[kPitch + n * 8]);
        }
      float* to = target(i);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[n][e] += odd[n][e];
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(acc[n][0], acc[n][1]);
        *reinterpret_cast<float2*>(to + 8 * D + n * 8) = make_float2(acc[n][2], acc[n][3]);
        u32* p = s_next + (row + (lane >> 2)) * kPitch + n * 8 + (lane & 3) * 2;
        *reinterpret_cast<uint2*>(p) = make_uint2(to_tf32(acc[n][0]), to_tf32(acc[n][1]));
        *reinterpret_cast<uint2*>(p + 8 * kPitch) =
            make_uint2(to_tf32(acc[n][2]), to_tf32(acc[n][3]));
      }
    }
    held = now != 0;
    now = after;
    after = later;
  }
}

template <class M, int D>
void launch(const Args& a, cudaStream_t stream) {
  constexpr u32 bytes = EndsSmem<M, D>::kBytes;
  cudaFuncSetAttribute(ends_kernel<M, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  launch_after(ends_kernel<M, D>, dim3(a.max_segments, a.v_heads * (2 * D / 64)), 256, bytes,
               M::kHopper, stream, a);
  check_launch("gated_delta_net ends of segments");
  launch_after(join_kernel<D, false>, dim3(a.v_heads * (D / kColumns), a.sequences), 2 * D, 0,
               M::kHopper, stream, a, a.joint_states);
  check_launch("gated_delta_net join of states");
}

}  // namespace

void launch_joints(const Args& a, int head_dim, bool hopper, cudaStream_t s) {
  if (a.max_joints == 0) return;
  if (head_dim == 256) return launch<MmaPortable, 256>(a, s);
  if (head_dim == 64) return hopper ? launch<MmaHopper, 64>(a, s) : launch<MmaPortable, 64>(a, s);
  hopper ? launch<MmaHopper, 128>(a, s) : launch<MmaPortable, 128>(a, s);
}

void launch_join_gradients(const Args& a, int head_dim, cudaStream_t s) {
  dim3 grid(a.v_heads * (head_dim / kColumns), a.sequences);
  if (head_dim == 64)
    join_kernel<64, true><<<grid, 128, 0, s>>>(a, a.joint_gradients);
  else if (head_dim == 128)
    join_kernel<128, true><<<grid, 256, 0, s>>>(a, a.joint_gradients);
  else
    join_kernel<256, true><<<grid, 512, 0, s>>>(a, a.joint_gradients);
  check_launch("gated_delta_net join of gradients");
}

}  // namespace heddle::ops::cuda::gdn
