#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace heddle::parallel {

/// Tensors of a micro-batch that a stage gives a neighbour: the hidden states of its forward, or
/// the gradients of its backward.
struct PipelineMessage {
  bool is_gradient;
  std::int64_t micro_batch, chunk;  ///< Chunk of the rank that sends.
  bool operator==(const PipelineMessage&) const = default;
};

/// Work of a rank of the pipeline at one time.
struct PipelineAction {
  bool is_backward;
  std::int64_t micro_batch, chunk;
  std::int64_t begin, end;  ///< Where a forward takes 1 and a backward 2 units of time.
  /// Messages of this rank that have certainly arrived when the action ends and that no action
  /// before told of: the neighbour received it before it sent what this action receives.
  std::vector<PipelineMessage> arrived = {};
};

/// Who does what in which order in one step, for all ranks of a pipeline.
class PipelineSchedule {
 public:
  /// `chunks` of layers on each of `ranks`: chunk c of rank p is stage c * ranks + p. With one
  /// chunk this is 1F1B ("PipeDream-Flush", arXiv 2006.09503), with several its interleaved form
  /// ("Efficient Large-Scale Language Model Training", arXiv 2104.04473), for any number of
  /// micro-batches. Every rank works out the same schedule; it can be run with blocking receives
  /// and sends that do not wait.
  PipelineSchedule(std::int64_t ranks, std::int64_t chunks, std::int64_t micro_batches);

  const std::vector<PipelineAction>& of(std::int64_t rank) const { return actions_[rank]; }
  std::int64_t duration() const { return duration_; }
  /// Share of the time in which a rank waits, mean over the ranks.
  double bubble() const;
  /// The most forward passes that wait for their backward on a rank.
  std::int64_t most_in_flight(std::int64_t rank) const;
  /// One line a rank, one letter a unit of time: a digit of the micro-batch's number in the
  /// forward (0-9), twice a letter in the backward (a-z), '.' while waiting. Cut at `width`.
  std::vector<std::string> draw(std::size_t width = 160) const;

 private:
  std::vector<std::vector<PipelineAction>> actions_;
  std::int64_t duration_ = 0;
};

/// Cuts layers of these costs into `stages` runs [first, last) of at least one layer, so that the
/// most expensive is as cheap as possible; `last_extra` is what the last stage does besides (the
/// head). Needs as many layers as stages.
std::vector<std::pair<std::int64_t, std::int64_t>> balanced_stages(const std::vector<double>& costs,
                                                                   std::int64_t stages,
                                                                   double last_extra);

}  // namespace heddle::parallel
