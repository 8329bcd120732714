#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "nn/block.h"
#include "parallel/activation_offload.h"
#include "parallel/recompute.h"
#include "parallel/sharding.h"

namespace heddle::parallel {

/// A block with all parameters it uses, adapters included.
struct BlockEntry {
  nn::Block* block;
  std::vector<nn::Parameter*> parameters;
  std::size_t unit = 0;  ///< Unit of the sharding, if there is one.
  /// Sets of adapters that are not known here may change it, so its backward always runs.
  bool takes_adapters = false;

  bool is_trained() const;
};

/// Units of the sharding that are wanted around the blocks: `before` them on the way to the next
/// micro-batch, and `behind` them. Their gather starts while the first or the last block runs.
struct EndUnits {
  std::vector<std::size_t> before, behind;
  /// Units that stand there, without what they read: their gradients are summed there.
  std::vector<std::size_t> own_before, own_behind;
};

/// Inputs of blocks that the device holds at most where they are sent to the host.
inline constexpr std::int64_t kOffloadedInputsOnDevice = 3;

struct BlockRunnerOptions {
  Recompute recompute = Recompute::kOff;  ///< For every block; see BlockRunner::set_recompute.
  Sharding* sharding = nullptr;  ///< Gives each block its parameters while it runs; may be null.
  /// From this device the inputs of what runs again go to the memory of the host.
  std::optional<c10::Device> offload_from = {};
  EndUnits ends = {};
};

/// Runs the decoder blocks forward and backward, each stage of each block an autograd graph of its
/// own: its input is detached, no edge spans stages, and this runner calls every backward itself.
/// A policy such as recomputation lives here and not in the model.
class BlockRunner {
 public:
  explicit BlockRunner(std::vector<BlockEntry> blocks, BlockRunnerOptions options = {});
  std::size_t size() const { return blocks_.size(); }

  /// Sets what runs again of each block; between steps, when no pass is under way.
  void set_recompute(std::vector<Recompute> by_block);
  /// Measures while all blocks are recomputed in full; null: no longer. `first_layer`: the number
  /// of block 0 for the probe.
  void set_probe(RecomputeProbe* probe, std::int64_t first_layer);

  /// Memory of one micro-batch for its backward; several may be in flight.
  class Tape {
   public:
    /// Sum of the blocks' auxiliary losses, undefined if there are none; of pooled ones see
    /// nn::BlockOutput.
    at::Tensor auxiliary_loss;
    at::Tensor expert_assignments;
    /// By block, the experts [T,k] that the forward chose; undefined where there are none. A
    /// recomputation takes them again. Given before the forward, they are taken there too (router
    /// replay).
    std::vector<at::Tensor> experts;
    /// Weight of a unit of the auxiliary loss in each entry of `auxiliary_loss`; undefined: 1.
    at::Tensor auxiliary_gradient;

   private:
    friend class BlockRunner;
    /// One stage with its graph.
    struct Graph {
      at::Tensor input;  ///< Detached; asks for a gradient.
      at::Tensor output, auxiliary;
    };
    /// Stages of one block whose graphs are kept or made again together.
    struct Island {
      std::size_t block = 0, first_stage = 0, stages = 1;
      KeptActivation input;       ///< Input of the first stage, detached; none where graphs stay.
      std::vector<Graph> graphs;  ///< By stage; none yet if they are made again.
    };
    nn::Pass pass;
    std::vector<Island> islands;
    std::optional<std::size_t> sent;  ///< The last of them whose input is on its way to the host.
  };

  /// Hidden states after the last block, detached. `wants_input_gradient`: something before the
  /// blocks is trained. Islands that have nothing trained in or before them keep nothing.
  at::Tensor forward(const at::Tensor& hidden, const nn::Pass& pass, bool wants_input_gradient,
                     Tape& tape);

  /// Accumulates the parameters' gradients and returns that of the input (undefined if it was not
  /// wanted). `auxiliary_scale` multiplies the gradient of the auxiliary losses. Consumes the tape.
  /// `is_last`: no further micro-batch adds to the gradients of this step (see Sharding::reduce).
  /// `goes_on`: a forward of these blocks for another micro-batch follows in the same step.
  at::Tensor backward(const at::Tensor& grad_hidden, double auxiliary_scale, Tape& tape,
                      bool is_last = true, bool goes_on = false);

  /// Without gradients, keeping nothing: evaluation and scoring. Sets `experts`, if there is one,
  /// by block to those of its tokens, undefined in a block that has none; defined ones are taken
  /// instead, as in Tape::experts.
  at::Tensor evaluate(at::Tensor hidden, const nn::Pass& pass,
                      std::vector<at::Tensor>* experts = nullptr);

 private:
  bool is_recomputed(std::size_t block, std::size_t stage) const;
  std::int64_t layer_of(std::size_t block) const {
    return first_layer_ + static_cast<std::int64_t>(block);
  }
  /// Runs one stage with its graph.
  Tape::Graph run(std::size_t block, std::size_t stage, const at::Tensor& input,
                  const nn::Pass& pass, nn::BlockOutput& output);
  void recompute(const Tape& tape, Tape::Island& island, at::Tensor input);
  /// Sends the newest island's input to the host, as another island follows.
  void offload_newest(Tape& tape);
  at::Tensor take(KeptActivation& input);
  /// Backward of one stage; returns the gradient of its input.
  at::Tensor differentiate(const Tape& tape, Tape::Graph graph, const at::Tensor& gradient,
                           double auxiliary_scale);
  void acquire(std::size_t block);
  void prefetch(std::size_t block);
  void prefetch_units(const std::vector<std::size_t>& units);
  void release(std::size_t block);

  std::vector<BlockEntry> blocks_;
  BlockRunnerOptions options_;
  std::vector<Recompute> recompute_;  ///< By block.
  RecomputeProbe* probe_ = nullptr;
  std::int64_t first_layer_ = 0;
  std::optional<ActivationOffload> offload_;
};

}  // namespace heddle::parallel
