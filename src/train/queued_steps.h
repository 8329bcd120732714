#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "assembly/model_on_ranks.h"
#include "config/run_config.h"
#include "data/batch.h"
#include "device/download.h"
#include "device/graph.h"
#include "device/recording_places.h"
#include "objective/language_model.h"
#include "train/micro_batch.h"
#include "train/optimizer.h"
#include "train/spike_policy.h"

namespace heddle::train {

/// Optimizer steps of a GPU, or of several that train together, of which the host hears nothing
/// before their end: forward, backward, norm, clipping and update. The next step can be queued
/// while one is under way, so that the device does not wait for the host in between. If wanted the
/// steps of one GPU are recorded as one graph of the device and replayed. A graph belongs to what
/// its launches depend on (sequence boundaries, loss rows rounded up); a step whose shape is met
/// for the first time runs launch by launch, one that comes again is recorded.
class QueuedSteps {
 public:
  struct Parts {
    models::Model* model;
    adapters::LoraSet* adapters;  ///< May be null.
    parallel::Pipeline* pipeline;
    const std::vector<nn::Parameter*>* trainable;
    Optimizer* optimizer;
    bool pooled_auxiliary_loss;  ///< train.router_aux_loss hf.
    double clip_norm;
    SpikePolicy* spikes = nullptr;  ///< May be null.
    objective::Neftune neftune = {};
    parallel::Sharding* sharding = nullptr;  ///< With several ranks.
  };
  QueuedSteps(const Parts& parts, bool record);

  struct Options {
    /// Factors of the gradients of loss_sum and of the router's loss.
    double loss_scale = 1, auxiliary_scale = 0;
    double lr = 0;
    std::uint64_t dropout_step = 0;  ///< The step, from 1; 0: no dropout.
    bool may_record = true;          ///< If not: launch by launch, whatever was recorded.
  };
  /// A step that the device has been given; what it will report.
  class Queued {
   public:
    struct Outcome {
      MicroBatchLoss sums;     ///< On the host, not divided.
      double grad_norm;        ///< Before clipping.
      double spike_threshold;  ///< A step with a larger norm updated nothing.
      /// See GradientCosine.
      std::optional<double> gradient_cosine = {};
    };
    /// Waits for the step's end, not for that of steps after it. If loss or norm is not finite,
    /// it updated nothing. Throws CommError if the ranks lost each other.
    Outcome wait();

   private:
    friend class QueuedSteps;
    Queued(device::Download results, std::shared_ptr<comm::World> world)
        : results_(std::move(results)), world_(std::move(world)) {}
    device::Download results_;
    std::shared_ptr<comm::World> world_;  ///< Null for one rank.
  };
  /// Queues one step after those that were queued before.
  Queued queue(std::span<const data::Batch> batches, const Options& options);

  /// Gives back the memory of the graphs if an ordinary step may not fit beside them; whether it
  /// did. They are recorded anew when their shapes come again.
  bool release_graphs();
  std::size_t graphs() const { return recorded_.size(); }

 private:
  using Shape = device::RecordingPlaces::Shape;
  struct Results {
    at::Tensor
        numbers;  ///< fp64 [5] on the device: loss, entropy, router's loss, norm, spike threshold
    at::Tensor expert_load;
  };
  struct Recorded {
    Shape shape;
    std::vector<objective::LocalBatch> batches;
    std::vector<objective::LossRows> rows;
    double auxiliary_scale = 0;
    Results results;
    std::unique_ptr<device::Graph> graph;
  };

  /// The graph of the step's shape with the step's batches, made now if it is worth it; null if
  /// there is none.
  const Recorded* recorded_for(Recorded& step);
  const Recorded* record(Recorded& step);
  Results enqueue(const Recorded& step);
  bool judges_spikes() const { return parts_.spikes != nullptr && parts_.spikes->is_on(); }

  Parts parts_;
  bool record_;
  std::deque<Recorded> recorded_;  ///< Oldest first.
  device::RecordingPlaces places_;
  std::size_t launched_ = 0;  ///< Steps before the first recording.
};

/// For an objective that is a sum over tokens. Recording if `train.cuda_graph` says so. Null where
/// the host is needed within a step, which is said on a GPU where recording was wanted.
std::unique_ptr<QueuedSteps> queued_steps(const config::RunConfig& config,
                                          assembly::ModelOnRanks& setup,
                                          const objective::Objective& objective,
                                          parallel::Pipeline& pipeline, Optimizer& optimizer,
                                          SpikePolicy& spikes);

}  // namespace heddle::train
