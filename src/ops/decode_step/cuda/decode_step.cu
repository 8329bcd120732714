// One step of generation as one kernel: 132 CTAs, one a multiprocessor, a warp that brings weights
// and 8 that multiply.
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
#include "ops/decode_step/cuda/decode_step.h"

#include <stdexcept>
#include <string>

#include "ops/cuda/element.h"
#include "ops/decode_step/cuda/attention.cuh"

namespace heddle::ops::cuda {
namespace decode {

template <int kRows>
struct Step {
  Multiplier<kRows>& m;
  const DecodeStepModel& model;
  const DecodeStepRows& rows;
  const Exchange& e;
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
  __device__ __forceinline__ void add_sums() {
    if (owns()) residual += kRead * m.sum(m.thread / 8, m.thread % 8, m.kWidePitch);
  }

  /// Writes the products of the CTA's columns with the normalised residual.
  template <int S>
  __device__ __forceinline__ void inputs(const DecodeStepLayer& layer, u32* to, int words,
                                         const Rounds& round) {
    m.template narrow<S>(layer.norm_mixer, e.residual, round.residual);
    const Part part = part_of(words, m.cta);
    for (int i = m.thread; i < kRows * 64; i += kThreads) {
      const int row = i / 64, column = i % 64;
      const float v = m.sum(row, column) * m.factor(row);
      if (column < 2 * part.count) m.note(row, v);
      const float next = __shfl_down_sync(~0u, v, 1);
      if (column % 2 == 0 && column < 2 * part.count)
        store_word(to + row * words + part.first + column / 2, make_word(v, next, round.kind));
    }
    m.end();
  }

  __device__ __forceinline__ void mlp(const DecodeStepLayer& layer, const Rounds& round,
                                      const History& kept) {
    // Gate and up: pairs of columns 0 to 27 and 28 to 55.
    m.template narrow<7>(layer.norm_mlp, e.middle, round.layer);
    const Part part = part_of(kInner / 2, m.cta);
    for (int row = m.warp; row < kRows; row += kWarps) {
      const float scale = m.factor(row);
      const int pair = min(m.lane, 27);
      const float gate = m.sum(row, pair) * scale;
      const float y = gate / (1.f + __expf(-gate)) * (m.sum(row, pair + 28) * scale);
      if (m.lane < 2 * part.count) m.note(row, y);
      const float next = __shfl_down_sync(~0u, y, 1);
      if (m.lane % 2 == 0 && m.lane < 2 * part.count)
        store_word(e.inner + row * (kInner / 2) + part.first + m.lane / 2,
                   make_word(y, next, round.layer));
    }
    m.end();
    // All mixers of the layer are behind its residual, which this CTA has read.
    if (kept.from != nullptr) kept.store();
    if (!is_wide()) return;
    m.template wide<kInner / 256>(e.inner, round.layer, [](float(&)[2], float(&)[2]) {});
    add_sums();
    write_residual(e.residual, round.residual + 1);
    m.end();
  }

  __device__ __forceinline__ void layer(int l, const Rounds& round) {
    const DecodeStepLayer& layer = model.layer[l];
    History kept{{}, nullptr};
    const auto onto_residual = [&](const auto& factors) {
      m.template wide<kMixer / 256>(e.mixed, round.layer, factors);
      add_sums();
      write_residual(e.middle, round.layer);
      m.end();
    };
    if (layer.is_attention) {
      inputs<(2 * ((kAttentionInputs / 2 + kCtas - 1) / kCtas) + 7) / 8>(
          layer, e.attention, kAttentionInputs / 2, round);
      if (is_wide()) {
        attend(m, layer, rows, e, round);
        join(m, rows, e, round);
        onto_residual([](float(&)[2], float(&)[2]) {});
      }
    } else {
      inputs<8>(layer, e.inputs, kDeltaInputs / 2, round);
      if (is_wide()) {
        kept = delta_net(m, layer, rows, e, round);
        onto_residual([&](float(&first)[2], float(&second)[2]) {
          apply_head_norm(m, e, round.kind, first, second);
        });
      }
    }
    mlp(layer, round, kept);
  }

  __device__ __forceinline__ void head(u32 round) {
    uint4 weights[m.kBlocks], x[m.kBlocks];
    m.norm(weights, model.norm);
    m.rows(x, e.residual, kWidth / 2, round);
    m.scale(x, weights);
    m.sync();
    float scales[(kRows * 64 + kThreads - 1) / kThreads];
#pragma unroll
    for (int i = 0; i * kThreads < kRows * 64; ++i)
      scales[i] = m.factor(min((m.thread + i * kThreads) / 64, kRows - 1));
    const Part part = part_of(model.vocabulary / 2, m.cta);
    for (int c = 0; c < 2 * part.count; c += 64) {
      uint4 w[8][m.kBlocks];
      m.take_columns(w);
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

  __device__ void run() {
    u32 step;
    load_words(step, e.step);
    if (owns())
      residual =
          number(model.embedding, rows.tokens[m.thread / 8] * kWidth + 8 * m.cta + m.thread % 8);
    u32 attention = 0;  // layers
    for (int l = 0; l < model.layers; ++l) attention += model.layer[l].is_attention;
    const u32 layers = model.layers;
    u32 delta_kind = step * (layers - attention), attention_kind = step * attention;
    const u32 first = step * (layers + 1);
    write_residual(e.residual, first);
    for (u32 l = 0; l < layers; ++l) {
      const u32 is_attention = model.layer[l].is_attention;
      layer(static_cast<int>(l),
            {is_attention ? attention_kind : delta_kind, step * layers + l, first + l});
      attention_kind += is_attention, delta_kind += 1 - is_attention;
    }
    head(first + layers);
    if (m.cta == 0 && m.thread == 0) *e.step = step + 1;
  }
};

struct Arguments {
  DecodeStepModel model;
  DecodeStepRows rows;
  u32* exchange;
};

template <int kRows>
__global__ void __launch_bounds__(kThreads + 128, 1)
    step_kernel(const __grid_constant__ Arguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) unsigned char memory[];
  Shared<kRows>& shared = *reinterpret_cast<Shared<kRows>*>(memory + kSlots<kRows> * kSlotBytes);
  const Ring ring{smem_u32(memory), smem_u32(shared.full), smem_u32(shared.empty), kSlots<kRows>};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots<kRows>; ++i) {
      mbar_init(ring.full + 8 * i, 1);
      mbar_init(ring.empty + 8 * i, kWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32,
            cta = static_cast<int>(blockIdx.x);
  if (warp >= kWarps) {
    set_max_registers_down<64>();
    if (warp == kWarps) {
      u64 policy;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      Loader<kRows> loader{ring, policy, lane, cta, a.model, a.rows};
      loader.run();
    }
  } else {
    set_max_registers_up<216>();
    Multiplier<kRows> m{
        shared,   ring,    a.model.norm_offset, a.model.eps, cta, thread, warp, lane,
        lane / 4, lane % 4};
    const Exchange e(a.exchange);
    Step<kRows> step{m, a.model, a.rows, e};
    step.run();
  }
#endif
}

template <int kRows>
void launch(const Arguments& a, cudaStream_t stream) {
  constexpr int kBytes = kSlots<kRows> * kSlotBytes + static_cast<int>(sizeof(Shared<kRows>));
  static_assert(kSlots<kRows> <= 16);
  const auto kernel = step_kernel<kRows>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  void* arguments[] = {const_cast<Arguments*>(&a)};
  // All CTAs wait for each other.
  const cudaError_t status =
      cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(kCtas),
                                  dim3(kThreads + 128), arguments, kBytes, stream);
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("decode_step: ") + cudaGetErrorString(status));
}

}  // namespace decode

bool decode_step_available() { return has_sm90a() && multiprocessors() >= decode::kCtas; }

int64_t decode_step_words() { return decode::Exchange::kWords; }

void decode_step(const DecodeStepModel& model, const DecodeStepRows& rows, uint32_t* exchange,
                 cudaStream_t stream) {
  const decode::Arguments a{model, rows, exchange};
  switch (rows.rows) {
    case 1:
      return decode::launch<1>(a, stream);
    case 2:
      return decode::launch<2>(a, stream);
    case 4:
      return decode::launch<4>(a, stream);
    case 8:
      return decode::launch<8>(a, stream);
    default:
      throw std::invalid_argument("decode_step: " + std::to_string(rows.rows) +
                                  " rows, the kernel takes 1, 2, 4 and 8");
  }
}

}  // namespace heddle::ops::cuda
