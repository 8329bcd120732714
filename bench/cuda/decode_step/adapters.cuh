// Sets of adapters of random numbers for decode_step, and which rows have which.
#pragma once

#include "problem.cuh"

namespace heddle::bench_cuda {

using ops::cuda::DecodeStepChanges;
using ops::cuda::SlotFactors;
using ops::cuda::SlotRun;

constexpr int kMatrices = DecodeStepChanges::kMatrices;
constexpr int kSlots = 9;  ///< More than sets, so that slots are not the rows' numbers.

/// Columns and depth of a layer's matrix in tables of changes; no columns: there is none.
inline std::pair<int, int> shape_of(const DecodeStepLayer& layer, int matrix) {
  if (matrix == 4) return {kWidth, kMixer};
  if (matrix == 5 || matrix == 6) return {kInner, kWidth};
  if (matrix == 7) return {kWidth, kInner};
  if (layer.is_attention) return {matrix == 0 ? 2 * kMixer : matrix < 3 ? kKeys : 0, kWidth};
  return {matrix == 0 ? kChannels : matrix == 1 ? kMixer : Shape::kDeltaHeads, kWidth};
}

/// A case of changes.
struct Mixture {
  const char* name;
  std::vector<int> sets;     ///< A row's set, repeated; -1: none.
  std::vector<int> ranks;    ///< A rank a set.
  unsigned matrices = 0xff;  ///< Bits of those that sets change.
  bool some_layers = false;  ///< A set leaves some matrices of some layers as they are.
};

/// Factors on the device, and copies of the tables on the host.
class Adapters {
 public:
  Adapters(const DecodeStepModel& m, int rows, const Mixture& mixture) : model_(m) {
    for (int row = 0; row < rows; ++row)
      set_of_row_.push_back(mixture.sets[static_cast<size_t>(row) % mixture.sets.size()]);
    for (int row = 0; row < rows;) {
      int last = row;
      while (last < rows &&
             set_of_row_[static_cast<size_t>(last)] == set_of_row_[static_cast<size_t>(row)])
        ++last;
      runs_.push_back({slot_of(set_of_row_[static_cast<size_t>(row)]), row, last - row, 0});
      row = last;
    }
    size_t count = 1;
    while (count < runs_.size()) count *= 2;
    runs_.resize(count, SlotRun{0, 0, 0, 0});
    int most = 0;
    for (const int set : set_of_row_)
      if (set >= 0) most = std::max(most, mixture.ranks[static_cast<size_t>(set)]);
    changes.count = static_cast<int>(count);
    changes.rank = 16;
    while (changes.rank < most) changes.rank *= 2;
    auto* const runs = keep(allocate<SlotRun>(static_cast<int64_t>(count)));
    check(cudaMemcpy(runs, runs_.data(), count * sizeof(SlotRun), cudaMemcpyHostToDevice));
    changes.runs = runs;
    table.resize(static_cast<size_t>(m.layers) * kMatrices * kSlots, SlotFactors{});
    for (int l = 0; l < m.layers; ++l) {
      for (int matrix = 0; matrix < kMatrices; ++matrix) {
        const auto [columns, depth] = shape_of(m.layer[l], matrix);
        if (columns == 0 || !(mixture.matrices >> matrix & 1)) continue;
        for (size_t set = 0; set < mixture.ranks.size(); ++set) {
          if (mixture.some_layers && (static_cast<size_t>(l + matrix) + set) % 3 == 0) continue;
          SlotFactors& f = entry(l, matrix, static_cast<int>(set));
          f.rank = mixture.ranks[set];
          f.scale = 0.25f + 0.5f * static_cast<float>(set % 3);
          f.a = keep(random(int64_t{f.rank} * depth, std::sqrt(3.f / static_cast<float>(depth))));
          f.b =
              keep(random(int64_t{columns} * f.rank, std::sqrt(3.f / static_cast<float>(f.rank))));
        }
        auto* const slots = keep(allocate<SlotFactors>(kSlots));
        check(cudaMemcpy(slots, &entry(l, matrix, 0) - slot_of(0), kSlots * sizeof(SlotFactors),
                         cudaMemcpyHostToDevice));
        changes.slots[l][matrix] = slots;
      }
    }
  }
  Adapters(const Adapters&) = delete;
  ~Adapters() {
    for (void* data : all_) cudaFree(data);
  }

  /// Factors of a row; rank 0: no change.
  SlotFactors of(int l, int matrix, int row) const {
    const int set = set_of_row_[static_cast<size_t>(row)];
    if (set < 0) return {};
    return table[static_cast<size_t>((l * kMatrices + matrix) * kSlots + slot_of(set))];
  }
  DecodeStepChanges changes;

 private:
  static int slot_of(int set) { return set < 0 ? -1 : (set + 3) % kSlots; }
  SlotFactors& entry(int l, int matrix, int set) {
    return table[static_cast<size_t>((l * kMatrices + matrix) * kSlots + slot_of(set))];
  }
  template <class T>
  T* keep(T* data) {
    all_.push_back(data);
    return data;
  }
  const DecodeStepModel& model_;
  std::vector<int> set_of_row_;
  std::vector<SlotRun> runs_;
  std::vector<SlotFactors> table;
  std::vector<void*> all_;
};

}  // namespace heddle::bench_cuda
