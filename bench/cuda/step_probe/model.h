// Shapes and tensors of the step that the probe makes: 0.8B, every layer one of the gated delta
// rule.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace heddle::step_probe {

/// All of a step, or for timing its parts: without the weights' copies, or without waiting for
/// input.
enum Mode { kWhole, kChainOnly, kStreamOnly };

constexpr int kWidth = 1024, kMixer = 2048, kInputs = 8224, kInner = 3584, kVocabulary = 248320;
constexpr int kRank = 16, kMostLayers = 24, kMostSequences = 8;
constexpr int kCtas = 132;             ///< One a multiprocessor.
constexpr int kWideCtas = kWidth / 8;  ///< CTAs with 8 columns of the residual, 16 of the mixer.
constexpr int kLowWords = kRank / 2;   ///< Words of a row's partial lows by one CTA.
constexpr int kInputAdapters = 4;      ///< q, k and v together, z, b, a.

/// Matrices [layer][columns, depth], factors A [layer][adapter][rank, depth] where each CTA makes
/// the lows, [layer][depth, rank] where the makers of the input do, B [layer][columns, rank].
struct Model {
  using bf16 = __nv_bfloat16;
  const bf16 *inputs, *out, *gate_up, *down, *head;
  const bf16 *norm_inputs, *norm_gate_up, *norm_head;
  const bf16 *a_inputs, *b_inputs, *a_out, *b_out, *a_gate_up, *b_gate_up, *a_down, *b_down;
  const bf16* embedding;  ///< [row, width]
};

/// Vectors between CTAs, [row][words], see words.cuh; the lows of a row by CTA.
struct Exchange {
  uint32_t *inputs, *mixed, *middle, *inner, *residual, *low_mixed, *low_inner;
  float* logits;  ///< [row, vocabulary]
};

/// Adapter of a column of the inputs.
__host__ __device__ inline int input_adapter(int column) {
  return (column >= 6144) + (column >= 8192) + (column >= 8208);
}
/// First word and words of a CTA's columns of a vector of `words` words.
struct Part {
  int first, count;
};
__host__ __device__ inline Part part_of(int words, int cta) {
  const int each = words / kCtas, more = words % kCtas;
  return {cta * each + (cta < more ? cta : more), each + (cta < more ? 1 : 0)};
}

}  // namespace heddle::step_probe
