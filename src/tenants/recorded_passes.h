#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "adapters/lora.h"
#include "assembly/model_on_ranks.h"
#include "device/graph.h"
#include "device/recording_places.h"
#include "objective/local_batch.h"
#include "objective/loss_rows.h"
#include "tenants/joint_passes.h"
#include "tenants/stand_ins.h"

namespace heddle::tenants {

/// Passes of several sets recorded as graphs of the device, forward and backward each, with the
/// loss on the host in between. A graph belongs to a shape: the sequences' lengths and, piece by
/// piece, the structure of the set (modules, ranks, scales). It works on stand-ins at fixed
/// addresses, to which the factors of the pass's sets are brought before a replay, so it serves any
/// sets of that shape. Which shapes are worth a recording device::RecordingPlaces says; all others
/// are left to launches.
class RecordedPasses {
 public:
  struct Loss {
    /// Derivatives of the loss by the log-probability of each row, from the log-probabilities.
    std::function<std::vector<double>(std::span<const double> logprobs)> derivatives;
    /// Derivatives that are known before: the device then goes on without the host.
    std::optional<std::vector<double>> constant = {};
  };

  /// Why passes of the model are queued launch by launch; empty: they can be recorded.
  static std::string why_not(const assembly::ModelOnRanks& base);

  /// `base` outlives it.
  explicit RecordedPasses(assembly::ModelOnRanks& base);

  /// Adds the gradients of the pieces, in whose rows every token has a label, to those of their
  /// sets, without waiting for the device at the end. Heads are not used. False: nothing was done;
  /// the pass is to be launched.
  bool run(std::span<const Piece> pieces, const Loss& loss);
  /// Pieces that may share a graph are alike in this order: by structure, then by lengths.
  std::vector<std::int64_t> order_of(const adapters::LoraSet& set,
                                     std::span<const std::int64_t> lengths) {
    std::vector<std::int64_t> order = {stand_ins_.structure_of(set)};
    order.insert(order.end(), lengths.begin(), lengths.end());
    return order;
  }
  /// Before a set ends.
  void forget(const adapters::LoraSet& set);
  std::size_t graphs() const { return recorded_.size(); }

 private:
  using Shape = device::RecordingPlaces::Shape;
  struct Recorded {
    Shape shape;
    objective::LocalBatch batch;
    objective::LossRows rows;
    std::vector<StandIns::Place> places;  ///< One a piece.
    at::Tensor values, d_values;          ///< Log-probabilities and the derivatives by them.
    std::unique_ptr<device::Graph> forward, backward;
  };

  /// `has_derivatives`: those of the loss are known before the pass.
  Shape shape_of(std::span<const Piece> pieces, bool has_derivatives);
  /// The graphs of the shape, made now if it is worth it; null if there are none.
  Recorded* recorded_for(std::span<const Piece> pieces, bool has_derivatives);
  /// The tokens and labels of other pieces of its shape, from which all else of a batch follows.
  static void refill(Recorded& pass, std::span<const Piece> pieces);
  Recorded* record(const Shape& shape, std::span<const Piece> pieces, bool has_derivatives);
  void queue(Recorded& pass, std::span<const Piece> pieces, bool has_derivatives);
  void drop_graph(std::size_t index);
  void drop_graphs();
  /// The shape cannot be recorded; others may be without what hinders it.
  void refuse(const Shape& shape, const std::string& reason);
  void give_up(const std::string& reason);
  /// Gives the graphs' memory back where a pass launched beside them may not fit.
  void make_room();

  assembly::ModelOnRanks& base_;
  StandIns stand_ins_{base_};
  bool records_ = true;
  int releases_ = 0;               ///< How often graphs went for a launched pass.
  std::deque<Recorded> recorded_;  ///< Oldest first.
  device::RecordingPlaces places_;
  std::vector<Shape> refused_;
};

}  // namespace heddle::tenants
