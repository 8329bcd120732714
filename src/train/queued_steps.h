#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "data/batch.h"
#include "device/graph.h"
#include "train/micro_batch.h"
#include "train/optimizer.h"
#include "train/setup.h"

namespace heddle::train {

/// Optimizer steps of one GPU of which the host hears nothing before their end: forward, backward,
/// norm, clipping and update. If wanted they are recorded as one graph of the device and replayed.
/// A graph belongs to what its launches depend on (sequence boundaries, loss rows rounded up); a
/// step whose shape is met for the first time runs launch by launch, one that comes again is
/// recorded.
class QueuedSteps {
 public:
  struct Parts {
    models::qwen3_5::Model* model;
    adapters::LoraSet* adapters;  ///< May be null.
    parallel::Pipeline* pipeline;
    const std::vector<nn::Parameter*>* trainable;
    Optimizer* optimizer;
    bool pooled_auxiliary_loss;  ///< train.router_aux_loss hf.
    double clip_norm;
  };
  QueuedSteps(const Parts& parts, bool record) : parts_(parts), record_(record) {}

  struct Outcome {
    double loss_sum;      ///< Of loss weight x loss, not divided.
    double entropy_sum;   ///< Of loss weight x entropy.
    double grad_norm;     ///< Before clipping.
    MicroBatchLoss sums;  ///< On the device; the next step may write over them.
  };
  /// What the gradients of loss_sum and of the router's loss are multiplied by.
  struct Scales {
    double loss = 1, auxiliary = 0;
  };
  /// One step; waits for its end. If loss or norm is not finite, nothing was updated. `may_record`
  /// false: launch by launch, whatever was recorded.
  Outcome run(std::span<const data::Batch> batches, const Scales& scales, double lr,
              bool may_record = true);

  /// Gives back the memory of the graphs if an ordinary step may not fit beside them; whether it
  /// did. They are recorded anew when their shapes come again.
  bool make_room();
  std::size_t graphs() const { return recorded_.size(); }

 private:
  /// What the launches of a step depend on.
  using Shape = std::vector<std::int64_t>;
  struct Results {
    at::Tensor numbers;  ///< fp64 [3] on the device, as in Outcome
    MicroBatchLoss sums;
  };
  struct Recorded {
    Shape shape;
    std::vector<LocalBatch> batches;
    std::vector<LossRows> rows;
    double auxiliary_scale = 0;
    Results results;
    std::unique_ptr<device::Graph> graph;
  };

  /// The graph of the step's shape with the step's batches, null if there is none; made now if the
  /// shape came before.
  const Recorded* recorded_for(Recorded& step);
  const Recorded* record(Recorded& step);
  Results enqueue(const Recorded& step);

  Parts parts_;
  bool record_;
  std::deque<Recorded> recorded_;  ///< Oldest first.
  std::deque<Shape> met_;          ///< Once; oldest first.
};

/// Recording if `train.cuda_graph` says so. Null where the host is needed within a step, which is
/// said on a GPU where recording was wanted.
std::unique_ptr<QueuedSteps> queued_steps(const config::RunConfig& config, Setup& setup,
                                          parallel::Pipeline& pipeline, Optimizer& optimizer);

}  // namespace heddle::train
