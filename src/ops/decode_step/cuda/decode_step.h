// A step of generation of few sequences as one kernel, from the tokens to the logits: plain C++, no
// ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/grouped_low_rank/cuda/slots.h"

namespace heddle::ops::cuda {

/// Shapes that the kernel is compiled for: those of Qwen3.5-0.8B. Layers and vocabulary are free.
struct DecodeStepShape {
  static constexpr int kWidth = 1024, kInner = 3584;
  static constexpr int kDeltaHeads = 16, kDeltaHeadDim = 128, kConvWidth = 4;
  static constexpr int kHeads = 8, kKeyHeads = 2, kHeadDim = 256, kRotaryDim = 64;
  static constexpr int kMostLayers = 32, kMostRows = 8;
  static constexpr int kCtas = 132;  ///< One a multiprocessor.
};

/// One decoder layer. Matrices are [out,in], weights contiguous and bf16 unless said otherwise.
struct DecodeStepLayer {
  bool is_attention = false;
  const void *norm_mixer = nullptr, *norm_mlp = nullptr;  ///< [width]
  /// Gated DeltaNet: q, k and v together, z, b, a. Attention: q with the gates, k, v.
  const void* inputs[4] = {};
  const void *out = nullptr, *gate = nullptr, *up = nullptr, *down = nullptr;
  // Gated DeltaNet.
  const void* conv = nullptr;                        ///< [channels,4]
  const float *a_log = nullptr, *dt_bias = nullptr;  ///< [heads]
  const void* norm = nullptr;                        ///< [head_dim]
  void* conv_states = nullptr;                       ///< [slots,channels,3] bf16, shifted in place.
  float* states = nullptr;                           ///< [slots,heads,head_dim,head_dim], in place.
  // Attention.
  const void *q_norm = nullptr, *k_norm = nullptr;  ///< [head_dim]
  void *keys = nullptr, *values = nullptr;          ///< [pages,page_tokens,key heads,head_dim]
};

struct DecodeStepModel {
  int layers = 0, vocabulary = 0;  ///< The vocabulary is even, at least 2 kCtas.
  float norm_offset = 0;           ///< Norms of the width and of q and k scale by offset + weight.
  float eps = 1e-6f;
  const void* embedding = nullptr;              ///< [tokens,width]
  const void *norm = nullptr, *head = nullptr;  ///< [width], [vocabulary,width]
  DecodeStepLayer layer[DecodeStepShape::kMostLayers];
};

/// The sequences of a step.
struct DecodeStepRows {
  int rows = 0;                      ///< 1, 2, 4 or 8.
  const int64_t* tokens = nullptr;   ///< [rows]
  const int64_t* slots = nullptr;    ///< [rows], of recurrent states.
  const int64_t* lengths = nullptr;  ///< [rows]: tokens in the caches.
  const int* pages = nullptr;        ///< [rows,table_pages]
  int table_pages = 0;
  int page_tokens = 0;                         ///< A power of two.
  const float *cos = nullptr, *sin = nullptr;  ///< [positions,rotary/2]
  float* logits = nullptr;                     ///< [rows,vocabulary]
};

/// Low-rank changes of the layers' matrices by rows: which sets have which factors stands on the
/// device, see LowRankSlots.
struct DecodeStepChanges {
  static constexpr int kMatrices = 8, kMostRank = 64;
  const SlotRun* runs = nullptr;  ///< [count]; null: the base model's step.
  int count = 0;                  ///< No more than rows; every row is of one run.
  int rank = 0;                   ///< 16, 32 or 64, no less than any rank that a run has.
  /// Factors of DecodeStepLayer::inputs, out, gate, up, down [slots]; null: no set changes the
  /// matrix.
  const SlotFactors* slots[DecodeStepShape::kMostLayers][kMatrices] = {};
  unsigned groups = 0;  ///< The kernel's own: which vectors of lows there are.
};

/// Whether this build has the kernel and the current device runs it.
bool decode_step_available();

/// Words of 32 bits of `exchange` below. Before the first step all bytes of it are 0xff but for the
/// first kDecodeStepHead words, which are 0. Steps with one exchange have the same model shape, as
/// many rows, the same count and rank of changes, and run one after another.
int64_t decode_step_words();
constexpr int kDecodeStepHead = 32;

/// Logits of the tokens; states and pages go on by them. Several rows may have one slot or write to
/// one page only if nobody wants their logits. One logit at least of a row is NaN where a number
/// between its products is not finite or beyond +-2^64.
void decode_step(const DecodeStepModel& model, const DecodeStepRows& rows, uint32_t* exchange,
                 cudaStream_t stream, const DecodeStepChanges* changes = nullptr);

}  // namespace heddle::ops::cuda
