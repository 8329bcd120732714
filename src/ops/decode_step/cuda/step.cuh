// One step of generation as one kernel: 132 CTAs, one a multiprocessor, a warp that brings weights,
// one ahead of it (scout.cuh) and 8 that multiply.
//
// The loading warp copies the CTA's columns of every matrix, layer after layer, through a ring of
// slots (8 rows of 1024 of the matrix), and waits for nothing but free slots. The others take the
// weights of a product into registers as they come, then look for the product's input, which other
// CTAs write, then multiply.
//
// Every product and mixer ends in the words of the next one's input (words.cuh): no barrier of the
// grid. A word of round n is written only by a CTA that has seen what all readers of round n - 1
// wrote after they had read, so that one bit tells the rounds apart. The number of the step comes
// from memory, where the first CTA raises it at the end: all CTAs have read it by then, because
// they had a part in the last layer.
//
// The residual stream stays in fp32 in the registers of the threads that add to it.
#pragma once

#include <stdexcept>
#include <string>

#include "ops/cuda/element.h"
#include "ops/decode_step/cuda/attention.cuh"
#include "ops/decode_step/cuda/scout.cuh"

namespace heddle::ops::cuda::decode {

/// Changes of gate and up of a warp's row, a lane a pair of columns, and its part of the lows of
/// the down product.
template <class M>
struct GatedChanges {
  M& m;
  const Part& part;  ///< Words of the inner vector.
  int run;
  u32 a[8];

  __device__ __forceinline__ GatedChanges(M& m, const Part& part)
      : m(m), part(part), run(m.run_of(m.warp % M::kMostRows)) {}
  /// Ranks 2g and 2g + 1 from `first` on, as rows of a product with the CTA's columns.
  __device__ __forceinline__ void load_a(int first) {
    const SlotFactors& f = m.factors(kDown, run);
    const int rank = first + 2 * m.g, left = m.has(kOfDown) ? f.rank - rank : 0;
    const bf16* const from =
        static_cast<const bf16*>(f.a) + rank * kInner + 2 * part.first + 2 * m.t;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int word = i / 2 * 4, row = i % 2;
      a[i] = 0;
      if (row < left && word + m.t < part.count)
        a[i] = load_factor4(from + row * kInner + 2 * word);
    }
  }
  __device__ __forceinline__ void add(u32* all, u32 round, float& gate, float& up) const {
    if (!m.has(kOfGated)) return;
    const int rank = m.changes.rank, column = 2 * part.first;
    const u32* const lows = m.own_lows(all, m.warp, 2);
    float sums[2] = {};
#pragma unroll 1
    for (int first = 0; first < rank; first += 16) {
      WarpChanges<2> b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        b[i].load(m.factors(kGate + i, run), column, 2 * part.count, first, m.g, m.t);
      uint2 low[2];
      await_words(low, lows, round, [&](int i) { return i * (rank / 2) + first / 2 + 2 * m.t; });
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) b[i].add(sums[i], low[i], m.t);
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const SlotFactors& f = m.factors(kGate + i, run);
      if (!has_whole_rows(f) && m.lane < 2 * part.count)
        (i == 0 ? sums[0] : sums[1]) += slow_change(f, column + m.lane, lows + i * (rank / 2));
    }
    gate += kRead * sums[0], up += kRead * sums[1];
  }
  /// Writes what the row's columns y, one a lane, add to the lows, after load_a(0).
  __device__ __forceinline__ void write_lows(u32* to, float y, u32 round) {
    if (!m.has(kOfDown)) return;
    const float scale = m.factors(kDown, run).scale;
    if (m.lane >= 2 * part.count) y = 0;
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] =
          pack_bf16(__shfl_sync(~0u, y, 8 * i + 2 * m.t), __shfl_sync(~0u, y, 8 * i + 2 * m.t + 1));
    const int column = m.cta * M::kMostRows + m.warp;
#pragma unroll 1
    for (int first = 0;; first += 16) {
      float c[4] = {};
      mma(c, a[0], a[1], a[2], a[3], x[0], x[1]);
      mma(c, a[4], a[5], a[6], a[7], x[2], x[3]);
      const float lo = c[0] * scale, hi = c[2] * scale;
      m.note(m.warp, lo), m.note(m.warp, hi);
      if (m.t == 0)
        store_word(to + part_place(kInnerLows<M::kMostRows>, column, first / 2 + m.g),
                   make_word(lo, hi, round));
      if (first + 16 >= m.changes.rank) break;
      load_a(first + 16);
    }
  }
};

template <int kRows, bool kChanges>
struct Step {
  Multiplier<kRows, kChanges>& m;
  const DecodeStepModel& model;
  const DecodeStepRows& rows;
  Exchange e;
  float residual = 0;  ///< Place of a row and column that this thread adds to.

  __device__ __forceinline__ bool is_wide() const { return m.cta < kWideCtas; }
  __device__ __forceinline__ bool owns() const { return is_wide() && m.thread < 8 * kRows; }
  __device__ __forceinline__ void write_residual(u32* to, u32 round) {
    if (m.thread >= (8 * kRows + 31) / 32 * 32) return;
    if (owns()) m.note(m.thread / 8, residual);
    const float next = __shfl_down_sync(~0u, residual, 1);
    if (owns() && m.thread % 2 == 0)
      store_word(to + m.thread / 8 * (kWidth / 2) + 4 * m.cta + m.thread % 8 / 2,
                 make_word(residual, next, round));
  }
  /// Or the compiler works out addresses of later phases, and of all layers, before the first, and
  /// has no registers for them.
  __device__ __forceinline__ void forget() {
    forget_values(m.thread, m.cta, e.step);
    m.place();
    e = Exchange(e.step);
  }
  __device__ __forceinline__ void add_sums() {
    if (owns()) residual += kRead * m.sum(m.thread / 8, m.thread % 8, m.kWidePitch);
  }

  /// Writes the products of the CTA's columns with the normalised residual.
  __device__ __forceinline__ void write_inputs(u32* to, int words, u32 round) {
    const Part part = part_of(words, m.cta);
    for (int i = m.thread; i < kRows * 64; i += kThreads) {
      const int row = i / 64, column = i % 64;
      const float v = m.sum(row, column) * m.factor(row);
      if (column < 2 * part.count) m.note(row, v);
      const float next = __shfl_down_sync(~0u, v, 1);
      if (column % 2 == 0 && column < 2 * part.count)
        store_word(to + row * words + part.first + column / 2, make_word(v, next, round));
    }
    m.end();
  }

  /// The mixer and the product of its output, onto the residual.
  __device__ __forceinline__ void mix(const DecodeStepLayer& layer, const Rounds& round) {
    const bool is_attention = layer.is_attention;
    if (is_attention) {
      attend(m, layer, rows, e, round);
      join(m, rows, e, round);
    } else {
      delta_net(m, layer, rows, e, round);
    }
    m.template wide<kMixer / 256>(e.mixed, round.layer(), PartialLows<kRows, true>{e.low_mixed},
                                  [&](float(&first)[2], float(&second)[2]) {
                                    if (!is_attention)
                                      apply_head_norm(m, e, round.kind(), first, second);
                                  });
    add_sums();
    write_residual(e.middle, round.layer());
    m.end();
  }

  /// From gate and up to the residual. Pairs of columns are 0 to 27 and 28 to 55.
  __device__ __forceinline__ void mlp(const DecodeStepLayer& layer, const Rounds& round) {
    const Part part = part_of(kInner / 2, m.cta);
    GatedChanges changes(m, part);
    if (m.warp < kRows) {
      if constexpr (kChanges) changes.load_a(0);
      const int row = m.warp, pair = min(m.lane, 27);
      const float scale = m.factor(row);
      float gate = m.sum(row, pair) * scale, up = m.sum(row, pair + 28) * scale;
      if constexpr (kChanges) changes.add(e.low_gated, round.layer(), gate, up);
      const float y = gate / (1.f + __expf(-gate)) * up;
      if (m.lane < 2 * part.count) m.note(row, y);
      const float next = __shfl_down_sync(~0u, y, 1);
      if (m.lane % 2 == 0 && m.lane < 2 * part.count)
        store_word(e.inner + row * (kInner / 2) + part.first + m.lane / 2,
                   make_word(y, next, round.layer()));
      if constexpr (kChanges) changes.write_lows(e.low_inner, y, round.layer());
    }
    m.end();
    // All mixers of the layer are behind its residual, which this CTA has read.
    store_kept<kRows>(m, layer, rows);
    if (!is_wide()) return;
    m.template wide<kInner / 256>(e.inner, round.layer(), PartialLows<kRows, false>{e.low_inner},
                                  [](float(&)[2], float(&)[2]) {});
    add_sums();
    write_residual(e.residual, round.residual() + 1);
    m.end();
  }

  __device__ __forceinline__ void layer(const Rounds& round) {
    const DecodeStepLayer& layer = model.layer[m.layer];
    const bool is_attention = layer.is_attention;
    // One copy of the product in the code: its registers are most of them.
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      forget();
      // Not before they are wanted, for the registers again.
      const auto lows = [&] {
        int which = half == 1 ? 0 : is_attention ? 1 : 2;
        forget_values(which);
        return which == 0   ? LowsToMake{e.low_gated, kOfGated, kGate, 2, round.layer()}
               : which == 1 ? LowsToMake{e.low_attention, kOfAttention, 0, 3, round.kind()}
                            : LowsToMake{e.low_inputs, kOfInputs, 0, 4, round.kind()};
      };
      m.narrow(half == 1 ? layer.norm_mlp : layer.norm_mixer, half == 1 ? e.middle : e.residual,
               half == 1 ? round.layer() : round.residual(),
               half == 1      ? 7
               : is_attention ? 5
                              : 8,
               half == 1 ? kDown : kOutput, lows);
      forget();
      if (half == 1) {
        mlp(layer, round);
      } else {
        write_inputs(is_attention ? e.attention : e.inputs,
                     is_attention ? kAttentionInputs / 2 : kDeltaInputs / 2, round.kind());
        if (is_wide()) mix(layer, round);
      }
    }
  }

  __device__ __forceinline__ void head(u32 round) {
    uint4 x[m.kBlocks];
    m.rows(x, e.residual, kWidth / 2, round);
    m.scale(x, [&](int i) { return __ldg(m.norm(model.norm, i)); });
    m.sync();
    float scales[(kRows * 64 + kThreads - 1) / kThreads];
#pragma unroll
    for (int i = 0; i * kThreads < kRows * 64; ++i)
      scales[i] = m.factor(min((m.thread + i * kThreads) / 64, kRows - 1));
    const Part part = part_of(model.vocabulary / 2, m.cta);
    for (int c = 0; c < 2 * part.count; c += 64) {
      uint4 w[8][m.kBlocks];
      m.template take_columns<0, 8, 8>(w, 8);
      m.multiply(w, x);
#pragma unroll
      for (int i = 0; i * kThreads < kRows * 64; ++i) {
        const int at = m.thread + i * kThreads, row = at / 64, column = at % 64;
        if (at < kRows * 64 && c + column < 2 * part.count)
          rows.logits[static_cast<int64_t>(row) * model.vocabulary + 2 * part.first + c + column] =
              m.sum(row, column) * scales[i];
      }
      m.end();
    }
    // Words are finite: what was lost on the way is told by a logit of the row.
    m.sync();
    if (m.lost == 0) return;
    for (int row = 0; row < kRows; ++row) {
      if (m.lost >> row & 1)
        rows.logits[static_cast<int64_t>(row) * model.vocabulary + 2 * part.first] = NAN;
    }
  }

  __device__ __forceinline__ void run() {
    u32 step;
    load_words(step, e.step);
    if (owns())
      residual =
          number(model.embedding, rows.tokens[m.thread / 8] * kWidth + 8 * m.cta + m.thread % 8);
    u32 attention = 0;  // layers
    for (int l = 0; l < model.layers; ++l) attention += model.layer[l].is_attention;
    const u32 layers = model.layers;
    // Rounds' lowest bits: of vectors of delta layers, of attention layers, of all layers, of the
    // residual.
    u32 bits = (step * (layers - attention) & 1) | (step * attention & 1) << 1 |
               (step * layers & 1) << 2 | (step * (layers + 1) & 1) << 3;
    write_residual(e.residual, bits >> 3);
#pragma unroll 1
    for (m.layer = 0; m.layer < model.layers; ++m.layer) {
      const u32 is_attention = model.layer[m.layer].is_attention;
      layer({(bits >> is_attention & 1) | bits >> 2 << 1});
      bits ^= 1 << is_attention | 4 | 8;
    }
    head(bits >> 3);
    if (m.cta == 0 && m.thread == 0) *e.step += 1;
  }
};

template <bool kChanges>
struct Arguments {
  DecodeStepModel model;
  DecodeStepRows rows;
  u32* exchange;
  typename ChangesOf<kChanges>::Type changes;
};

template <int kRows, bool kChanges>
__global__ void __launch_bounds__(kThreads + 128, 1)
    step_kernel(const __grid_constant__ Arguments<kChanges> a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kCount = kSlots<kRows, kChanges>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kRows, kChanges>*>(memory + kCount * kSlotBytes);
  const Ring ring{smem_u32(memory), smem_u32(shared.full), smem_u32(shared.empty), kCount};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kCount; ++i) {
      mbar_init(ring.full + 8 * i, 1);
      mbar_init(ring.empty + 8 * i, kWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if constexpr (kChanges) {
    const int run = static_cast<int>(threadIdx.x);
    if (run < kRows) {
      SlotRun own{-1, 0, 0, 0};
      if (run < a.changes.count) own = a.changes.runs[run];
      shared.changes.runs[run] = own;
      for (int row = own.first; row < min(own.first + own.rows, kRows); ++row)
        shared.changes.run_of_row[row] = run;
    }
  }
  __syncthreads();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32,
            cta = static_cast<int>(blockIdx.x);
  if (warp >= kWarps) {
    set_max_registers_down<56>();
    if (warp == kWarps + 1) {
      Scout<kRows, kChanges> scout{lane, cta, a.model, a.rows, a.changes, shared.changes};
      scout.run();
    } else if (warp == kWarps) {
      u64 policy;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      Loader<kRows, kChanges> loader{ring, policy, lane, cta, a.model, a.changes, shared.changes};
      loader.run();
    }
  } else {
    set_max_registers_up<224>();
    Multiplier<kRows, kChanges> m{shared, ring,     a.model.norm_offset, a.model.eps, cta,
                                  thread, a.changes};
    m.place();
    const Exchange e(a.exchange);
    Step<kRows, kChanges> step{m, a.model, a.rows, e};
    step.run();
  }
#endif
}

template <int kRows, bool kChanges>
void launch(const Arguments<kChanges>& a, cudaStream_t stream) {
  constexpr int kCount = kSlots<kRows, kChanges>;
  constexpr int kBytes = kCount * kSlotBytes + static_cast<int>(sizeof(Shared<kRows, kChanges>));
  static_assert(kCount <= 16);
  const auto kernel = step_kernel<kRows, kChanges>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  void* arguments[] = {const_cast<Arguments<kChanges>*>(&a)};
  // All CTAs wait for each other.
  const cudaError_t status =
      cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(kCtas),
                                  dim3(kThreads + 128), arguments, kBytes, stream);
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("decode_step: ") + cudaGetErrorString(status));
}

/// In a source of its own, so that the two are compiled side by side.
void launch_changed(const Arguments<true>& a, cudaStream_t stream);

template <bool kChanges>
void launch_rows(const Arguments<kChanges>& a, cudaStream_t stream) {
  switch (a.rows.rows) {
    case 1:
      return launch<1>(a, stream);
    case 2:
      return launch<2>(a, stream);
    case 4:
      return launch<4>(a, stream);
    case 8:
      return launch<8>(a, stream);
    default:
      throw std::invalid_argument("decode_step: " + std::to_string(a.rows.rows) +
                                  " rows, the kernel takes 1, 2, 4 and 8");
  }
}

}  // namespace heddle::ops::cuda::decode
