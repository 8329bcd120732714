#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "comm/mesh.h"
#include "models/model.h"
#include "parallel/block_runner.h"
#include "parallel/pipeline_schedule.h"

namespace heddle::parallel {

/// Layers of each stage of the pipeline: stage c * ranks + p is chunk c of rank p. The first
/// has the embedding besides, the last final norm and head.
struct StagePlan {
  std::int64_t ranks = 1, chunks = 1;
  std::vector<std::pair<std::int64_t, std::int64_t>> layers;  ///< [stage] first and after the last

  std::int64_t stages() const { return ranks * chunks; }
  /// The layers of a rank, chunk by chunk.
  std::vector<std::int64_t> layers_of(std::int64_t rank) const;
  /// The most micro-batches of a step whose forward pass waits for its backward on a rank; with
  /// several chunks in parts, a chunk's pass being 1 / chunks.
  double most_in_flight(std::int64_t rank, double micro_batches) const;
  /// Stages of equal cost in matrix products.
  static StagePlan balanced(const models::Config& model, std::int64_t ranks, std::int64_t chunks);
};

/// Marks what this rank of the pipeline holds: the units of its stages and what they read. A tied
/// embedding is held by the first and the last rank, and counts on the first.
void hold_stages(models::Model& model, const StagePlan& plan, std::int64_t rank);

/// This rank's stages and its neighbours. One rank is a pipeline of one stage.
class Pipeline {
 public:
  struct Stage {
    std::int64_t number, first_layer;
    bool is_first, is_last;
    bool sends_gradient;  ///< Something before it is trained.
    bool has_backward;    ///< Something in it, before it or after the last stage is trained.
    BlockRunner runner;
  };

  /// `blocks`: all layers of the model. `embedding_trained`: something before the first layer is.
  /// The stages' runners have `options`, but for the ends that other ranks hold.
  Pipeline(const comm::Mesh& mesh, const StagePlan& plan, const std::vector<BlockEntry>& blocks,
           bool embedding_trained, const BlockRunnerOptions& options);
  /// A pipeline of one rank.
  Pipeline(const std::vector<BlockEntry>& blocks, bool embedding_trained,
           const BlockRunnerOptions& options = {})
      : Pipeline(comm::Mesh::single(), {1, 1, {{0, static_cast<std::int64_t>(blocks.size())}}},
                 blocks, embedding_trained, options) {}

  std::vector<Stage>& stages() { return stages_; }
  /// See BlockRunner; `by_layer` of all layers of the model, those of other ranks are ignored.
  void set_recompute(const std::vector<Recompute>& by_layer);
  void set_probe(RecomputeProbe* probe);
  bool has_last_stage() const { return stages_.back().is_last; }
  /// In which order this rank runs them for the micro-batches of a step.
  std::vector<PipelineAction> actions(std::int64_t micro_batches) const;
  PipelineSchedule schedule(std::int64_t micro_batches) const {
    return PipelineSchedule(plan_.ranks, plan_.chunks, micro_batches);
  }

  /// Runs all layers without gradients: hidden states [T/tp,H] after the last one, undefined where
  /// the last stage is elsewhere. tokens [T] on the model's device; `pass` describes them. Sets
  /// `experts`, if there is one, by layer of the model: [T/tp,k] of the layers with experts that
  /// are here. Those that it has already are taken instead of the routers' choices.
  at::Tensor evaluate(models::Model& model, const at::Tensor& tokens, const nn::Pass& pass,
                      std::vector<at::Tensor>* experts = nullptr);

  // Hidden states go to the next stage, their gradients to the one before. A send does not wait,
  // and keeps its tensor until finish_sends(), which waits and is due before the next step, or
  // until drop_arrived() after an action of the step: without it a step would keep as many tensors
  // as it has micro-batches.
  void send_hidden(const Stage& stage, std::int64_t micro_batch, const at::Tensor& hidden);
  /// Receives the stage before's hidden states of these sizes and options ([T/tp,H]). Waits;
  /// CommError at the deadline.
  at::Tensor receive_hidden(const Stage& stage, std::int64_t micro_batch, at::IntArrayRef sizes,
                            at::TensorOptions options);
  void send_gradient(const Stage& stage, std::int64_t micro_batch, const at::Tensor& gradient);
  /// Receives the gradient of what this stage sent, from the stage after it; as receive_hidden.
  at::Tensor receive_gradient(const Stage& stage, std::int64_t micro_batch, at::IntArrayRef sizes,
                              at::TensorOptions options);
  /// Lets go of what has arrived by the end of this action. There is nothing to wait for, except
  /// where nothing before the neighbour is trained: that one answers nothing, and this rank stays
  /// as far ahead of it as it would be if it did.
  void drop_arrived(const PipelineAction& action);
  void finish_sends();
  /// Tensors that are kept for what was sent.
  std::size_t kept_sends() const { return sent_.size(); }

 private:
  void send(const comm::Group& group, std::int64_t to_stage, int tag, const at::Tensor& tensor);
  at::Tensor receive(const comm::Group& group, std::int64_t from_stage, int tag,
                     at::IntArrayRef sizes, at::TensorOptions options);
  int tag(std::int64_t micro_batch, std::int64_t stage) const;

  StagePlan plan_;
  // Both of the ranks along pp. Between two ranks hidden states overtake gradients, and the other
  // way about: each kind has a group of its own.
  comm::Group hidden_, gradients_;
  std::vector<Stage> stages_;
  struct Sent {
    bool is_gradient;
    int tag;
    at::Tensor tensor;
    comm::Pending pending;
  };
  std::vector<Sent> sent_;
};

}  // namespace heddle::parallel
