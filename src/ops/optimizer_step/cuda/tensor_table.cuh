// One launch over many tensors: their table is the kernel's argument, cut into launches that fit,
// or lies in the device's memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace heddle::ops::cuda {

/// Tensors of one launch and the blocks that belong to each. Entry has a member `count`, the number
/// of elements, of which a block takes kBlockElements.
template <class Entry, int kBlockElements>
struct TensorTable {
  // Below the 4 KB of kernel arguments that every driver takes, with room for scalars.
  static constexpr int kTensors = 3900 / static_cast<int>(sizeof(Entry) + sizeof(int));

  Entry entries[kTensors];
  int first_block[kTensors + 1];
  int count;

  /// The tensor of this block, and the block's first element in it.
  struct Place {
    int tensor;
    std::int64_t begin;
  };
  __device__ __forceinline__ Place place() const {
    int low = 0, high = count;  // first_block[low] <= block < first_block[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_block[middle] <= static_cast<int>(blockIdx.x) ? low : high) = middle;
    }
    return {low, static_cast<std::int64_t>(blockIdx.x - first_block[low]) * kBlockElements};
  }

  /// Calls launch(table, blocks) for as many tables as the entries need.
  template <class F>
  static void for_each(const std::vector<Entry>& entries, const F& launch) {
    for (std::size_t first = 0; first < entries.size(); first += kTensors) {
      TensorTable table{};
      table.count = static_cast<int>(std::min<std::size_t>(kTensors, entries.size() - first));
      for (int i = 0; i < table.count; ++i) {
        table.entries[i] = entries[first + static_cast<std::size_t>(i)];
        const std::int64_t blocks = blocks_of(table.entries[i]);
        table.first_block[i + 1] = table.first_block[i] + static_cast<int>(blocks);
      }
      const int blocks = table.first_block[table.count];
      if (blocks > 0) launch(table, blocks);
    }
  }
  static std::int64_t blocks_of(const Entry& entry) {
    return (entry.count + kBlockElements - 1) / kBlockElements;
  }
};

/// A table of any number of tensors, in the device's memory.
template <class Entry, int kBlockElements>
struct StoredTensorTable {
  const Entry* entries;
  const int* tensor_of_block;
  const int* first_block;  ///< A tensor's first block, for each tensor.

  struct Place {
    int tensor;
    std::int64_t begin;
  };
  __device__ __forceinline__ Place place() const {
    const int tensor = tensor_of_block[blockIdx.x];
    return {tensor, static_cast<std::int64_t>(static_cast<int>(blockIdx.x) - first_block[tensor]) *
                        kBlockElements};
  }
};

}  // namespace heddle::ops::cuda
