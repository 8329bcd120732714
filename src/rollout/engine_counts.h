#pragma once

#include <cstdint>

namespace heddle::rollout {

/// Counts of what an engine did, on all data ranks together.
struct EngineCounts {
  std::int64_t draws = 0;            ///< Passes that drew a token of each of their sequences.
  std::int64_t recorded_draws = 0;   ///< Passes of them that were replayed as a graph.
  std::int64_t drawn_sequences = 0;  ///< Sequences of these passes, added up.
  /// Times that a running sequence lost its state, to changed weights or for want of memory, and
  /// is read again.
  std::int64_t preempted = 0;
  bool operator==(const EngineCounts&) const = default;
  EngineCounts& operator+=(const EngineCounts& other) {
    draws += other.draws;
    recorded_draws += other.recorded_draws;
    drawn_sequences += other.drawn_sequences;
    preempted += other.preempted;
    return *this;
  }
};

}  // namespace heddle::rollout
