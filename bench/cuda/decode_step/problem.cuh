// A model of random numbers for decode_step, its caches, and a copy of these for the reference.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "../random_matrix.cuh"
#include "ops/decode_step/cuda/decode_step.h"

namespace heddle::bench_cuda {

using bf16 = __nv_bfloat16;
using ops::cuda::DecodeStepLayer;
using ops::cuda::DecodeStepModel;
using ops::cuda::DecodeStepRows;
using Shape = ops::cuda::DecodeStepShape;

constexpr int kWidth = Shape::kWidth, kInner = Shape::kInner, kMixer = 2048, kChannels = 3 * kMixer,
              kKeys = Shape::kKeyHeads * Shape::kHeadDim;
constexpr int kPageTokens = 32;

template <class T>
T* allocate(int64_t count) {
  T* to;
  check(cudaMalloc(&to, count * static_cast<int64_t>(sizeof(T))));
  return to;
}
inline bf16* random(int64_t count, float scale) {
  static unsigned seed = 1;
  bf16* const to = allocate<bf16>(count);
  fill<<<1024, 256>>>(to, count, seed += 7919, scale);
  check(cudaGetLastError());
  return to;
}
static __global__ void fill_floats(float* data, int64_t count, unsigned seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    unsigned h = static_cast<unsigned>(i) * 2654435761u + seed;
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
    data[i] = (static_cast<float>(h & 0xffff) / 32768.f - 1.f) * scale;
  }
}

inline float* random_floats(int64_t count, float scale) {
  static unsigned seed = 5;
  float* const to = allocate<float>(count);
  fill_floats<<<1024, 256>>>(to, count, seed += 7919, scale);
  check(cudaGetLastError());
  return to;
}

/// Sizes of the caches.
struct CacheSizes {
  int slots, pages;
  int64_t conv() const { return int64_t{slots} * kChannels * 3; }
  int64_t states() const { return int64_t{slots} * Shape::kDeltaHeads * 128 * 128; }
  int64_t keys() const { return int64_t{pages} * kPageTokens * kKeys; }
};

/// Every fourth layer has attention.
constexpr int64_t kTokens = 64;  ///< Rows of the embedding.

inline DecodeStepModel make_model(int layers, int vocabulary, const CacheSizes& sizes) {
  const auto scaled = [](int64_t columns, int depth) {
    return random(columns * depth, std::sqrt(3.f / static_cast<float>(depth)));
  };
  DecodeStepModel m;
  m.layers = layers, m.vocabulary = vocabulary;
  m.norm_offset = 0.5f;
  m.embedding = random(kTokens * kWidth, 1.f);
  m.norm = random(kWidth, 1.7f), m.head = scaled(vocabulary, kWidth);
  for (int l = 0; l < layers; ++l) {
    DecodeStepLayer& layer = m.layer[l];
    layer.is_attention = l % 4 == 3;
    layer.norm_mixer = random(kWidth, 1.7f), layer.norm_mlp = random(kWidth, 1.7f);
    layer.out = scaled(kWidth, kMixer), layer.down = scaled(kWidth, kInner);
    layer.gate = scaled(kInner, kWidth), layer.up = scaled(kInner, kWidth);
    if (layer.is_attention) {
      const int columns[3] = {2 * kMixer, kKeys, kKeys};
      for (int i = 0; i < 3; ++i) layer.inputs[i] = scaled(columns[i], kWidth);
      layer.q_norm = random(Shape::kHeadDim, 1.f), layer.k_norm = random(Shape::kHeadDim, 1.f);
      layer.keys = random(sizes.keys(), 1.5f), layer.values = random(sizes.keys(), 1.5f);
    } else {
      const int columns[4] = {kChannels, kMixer, Shape::kDeltaHeads, Shape::kDeltaHeads};
      for (int i = 0; i < 4; ++i) layer.inputs[i] = scaled(columns[i], kWidth);
      layer.conv = random(kChannels * 4, 0.9f);
      layer.a_log = random_floats(Shape::kDeltaHeads, 1.f);
      layer.dt_bias = random_floats(Shape::kDeltaHeads, 1.f);
      layer.norm = random(128, 1.7f);
      layer.conv_states = random(sizes.conv(), 1.5f);
      layer.states = random_floats(sizes.states(), 0.3f);
    }
  }
  return m;
}

/// The caches of a model, to begin from them again.
class Caches {
 public:
  Caches(const DecodeStepModel& m, const CacheSizes& sizes) {
    each(m, sizes, [&](void* data, int64_t bytes) {
      copies_.push_back(allocate<char>(bytes));
      check(cudaMemcpy(copies_.back(), data, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice));
    });
  }
  void restore(const DecodeStepModel& m, const CacheSizes& sizes) const {
    size_t i = 0;
    each(m, sizes, [&](void* data, int64_t bytes) {
      check(cudaMemcpy(data, copies_[i++], static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice));
    });
  }
  template <class F>
  static void each(const DecodeStepModel& m, const CacheSizes& sizes, const F& f) {
    for (int l = 0; l < m.layers; ++l) {
      const DecodeStepLayer& layer = m.layer[l];
      if (layer.is_attention) {
        f(layer.keys, sizes.keys() * 2), f(layer.values, sizes.keys() * 2);
      } else {
        f(layer.conv_states, sizes.conv() * 2), f(layer.states, sizes.states() * 4);
      }
    }
  }

 private:
  std::vector<char*> copies_;
};

/// The sequences of some steps, on the device.
struct Sequences {
  int rows, table_pages;
  std::vector<int64_t> slots_host, lengths_host;
  std::vector<int> pages_host;
  int64_t *slots, *lengths, *tokens;
  int* pages;
  float *cos, *sin, *logits;

  Sequences(int rows, const std::vector<int64_t>& of_lengths, const CacheSizes& sizes,
            int vocabulary, int positions)
      : rows(rows), lengths_host(of_lengths) {
    table_pages = (positions + kPageTokens - 1) / kPageTokens;
    for (int row = 0; row < rows; ++row) slots_host.push_back(sizes.slots - 1 - row);
    for (int i = 0; i < rows * table_pages; ++i)
      pages_host.push_back(static_cast<int>((int64_t{i} * 17 + 5) % sizes.pages));
    slots = allocate<int64_t>(rows), lengths = allocate<int64_t>(rows);
    pages = allocate<int>(rows * table_pages);
    tokens = allocate<int64_t>(rows);
    logits = allocate<float>(int64_t{rows} * vocabulary);
    check(cudaMemcpy(slots, slots_host.data(), static_cast<size_t>(rows) * 8,
                     cudaMemcpyHostToDevice));
    check(cudaMemcpy(pages, pages_host.data(), pages_host.size() * 4, cudaMemcpyHostToDevice));
    const int half = Shape::kRotaryDim / 2;
    std::vector<float> c, s;
    for (int p = 0; p < positions; ++p) {
      for (int i = 0; i < half; ++i) {
        const double angle = p * std::pow(1e7, -static_cast<double>(i) / half);
        c.push_back(static_cast<float>(std::cos(angle)));
        s.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    cos = allocate<float>(static_cast<int64_t>(c.size())),
    sin = allocate<float>(static_cast<int64_t>(s.size()));
    check(cudaMemcpy(cos, c.data(), c.size() * 4, cudaMemcpyHostToDevice));
    check(cudaMemcpy(sin, s.data(), s.size() * 4, cudaMemcpyHostToDevice));
    begin(0);
  }
  /// Lengths and tokens of step `step`.
  void begin(int step) {
    std::vector<int64_t> now = lengths_host;
    for (int64_t& length : now) length += step;
    check(cudaMemcpy(lengths, now.data(), now.size() * 8, cudaMemcpyHostToDevice));
    for (int row = 0; row < rows; ++row)
      now[static_cast<size_t>(row)] = (5 + 11 * row + 3 * step) % kTokens;
    check(cudaMemcpy(tokens, now.data(), now.size() * 8, cudaMemcpyHostToDevice));
  }
  DecodeStepRows step() const {
    DecodeStepRows r;
    r.rows = rows, r.tokens = tokens, r.slots = slots, r.lengths = lengths, r.pages = pages;
    r.table_pages = table_pages, r.page_tokens = kPageTokens;
    r.cos = cos, r.sin = sin, r.logits = logits;
    return r;
  }
};

}  // namespace heddle::bench_cuda
