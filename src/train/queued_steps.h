#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "data/batch.h"
#include "device/download.h"
#include "device/graph.h"
#include "train/micro_batch.h"
#include "train/optimizer.h"
#include "train/setup.h"

namespace heddle::train {

/// Optimizer steps of one GPU of which the host hears nothing before their end: forward, backward,
/// norm, clipping and update. The next step can be queued while one is under way, so that the
/// device does not wait for the host in between. If wanted steps are recorded as one graph of the
/// device and replayed. A graph belongs to what its launches depend on (sequence boundaries, loss
/// rows rounded up); a step whose shape is met for the first time runs launch by launch, one that
/// comes again is recorded.
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

  /// What the gradients of loss_sum and of the router's loss are multiplied by.
  struct Scales {
    double loss = 1, auxiliary = 0;
  };
  /// A step that the device has been given; what it will report.
  class Flight {
   public:
    struct Outcome {
      MicroBatchLoss sums;  ///< On the host, not divided.
      double grad_norm;     ///< Before clipping.
    };
    /// Waits for the step's end, not for that of steps behind it. If loss or norm is not finite,
    /// it updated nothing.
    Outcome wait();

   private:
    friend class QueuedSteps;
    explicit Flight(device::Download results) : results_(std::move(results)) {}
    device::Download results_;
  };
  /// Queues one step behind those that were queued before. `may_record` false: launch by launch,
  /// whatever was recorded.
  Flight queue(std::span<const data::Batch> batches, const Scales& scales, double lr,
               bool may_record = true);

  /// Gives back the memory of the graphs if an ordinary step may not fit beside them; whether it
  /// did. They are recorded anew when their shapes come again.
  bool make_room();
  std::size_t graphs() const { return recorded_.size(); }

 private:
  /// What the launches of a step depend on.
  using Shape = std::vector<std::int64_t>;
  struct Results {
    at::Tensor numbers;  ///< fp64 [4] on the device: loss, entropy, router's loss, norm
    at::Tensor expert_load;
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
