#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "device/memory_meter.h"
#include "parallel/recompute_policy.h"

namespace heddle::parallel {

/// Memory and time of the stages of blocks, measured in steps in which every block is recomputed in
/// full: a stage that runs again is there alone between its forward and its backward. Memory is
/// that of the blocks' device, on which each measured piece is waited for.
class RecomputeProbe {
 public:
  /// `elementwise`: which graphs are measured, those that keep the results of elementwise operators
  /// or those that do not.
  RecomputeProbe(c10::Device device, device::MemoryMeter& meter, bool elementwise)
      : device_(device), meter_(meter), elementwise_(elementwise) {}

  static constexpr std::size_t kStages = 2;
  struct Stage {
    double bytes = 0;  ///< Kept by its graph, with its output.
    double forward_s = 0, backward_s = 0;
  };
  /// Figures of one layer, summed over `rows` rows of hidden states.
  struct Layer {
    double rows = 0;
    double input_bytes = 0;
    std::array<Stage, kStages> stages;
  };
  /// How many inputs of each layer were kept (missing: none).
  using Kept = std::map<std::int64_t, std::int64_t>;
  /// Use of memory relative to the meter's start, bytes.
  struct Moment {
    std::int64_t peak = 0;
    std::int64_t lasting = 0;  ///< Bytes that stay besides inputs: gradients of parameters.
  };

  bool elementwise() const { return elementwise_; }
  const std::map<std::int64_t, Layer>& layers() const { return layers_; }
  /// The highest by what was kept.
  const std::map<Kept, Moment>& moments() const { return moments_; }

  // Called by the block runner, and note_peak() also at the end of the step.
  /// The input of a block waits for its backward, `rows` rows of hidden states, and no longer.
  void keep(std::int64_t layer, std::int64_t rows, std::int64_t bytes);
  void release(std::int64_t layer, std::int64_t bytes);
  /// Runs work and adds its time and what it leaves.
  void measure_forward(std::int64_t layer, std::size_t stage, const std::function<void()>& work);
  void measure_backward(std::int64_t layer, std::size_t stage, const std::function<void()>& work);
  /// The peak since the last call belongs to what is kept now.
  void note_peak();

 private:
  double timed(const std::function<void()>& work) const;

  c10::Device device_;
  device::MemoryMeter& meter_;
  bool elementwise_;
  std::map<std::int64_t, Layer> layers_;
  Kept kept_;
  std::int64_t kept_bytes_ = 0;
  std::map<Kept, Moment> moments_;
};

}  // namespace heddle::parallel
