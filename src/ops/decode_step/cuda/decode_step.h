// A step of generation of few sequences as one kernel, from the tokens to the logits: plain C++, no
// ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

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

/// Whether this build has the kernel and the current device runs it.
bool decode_step_available();

/// Words of 32 bits of `exchange` below. Before the first step all bytes of it are 0xff but for the
/// first kDecodeStepHead words, which are 0. Steps with one exchange have the same model shape and
/// as many rows, and run one after another.
int64_t decode_step_words();
constexpr int kDecodeStepHead = 32;

/// Logits of the tokens; states and pages go on by them. Several rows may have one slot or write to
/// one page only if nobody wants their logits. One logit at least of a row is NaN where a number
/// between its products is not finite or beyond +-2^64.
void decode_step(const DecodeStepModel& model, const DecodeStepRows& rows, uint32_t* exchange,
                 cudaStream_t stream);

}  // namespace heddle::ops::cuda
