#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "adapters/lora.h"
#include "assembly/model_on_ranks.h"
#include "data/batch.h"
#include "objective/objective.h"

namespace heddle::tenants {

/// Sequences of one set that run in one pass, with those of other sets before and after them.
struct Piece {
  const adapters::LoraSet* set = nullptr;
  data::Batch batch;  ///< On the host; the same on all ranks along tp and pp.
  /// Gets the hidden states of the whole pass, and as its batch that of the pass with the labels of
  /// this piece alone.
  objective::HeadFunction head;
  std::uint64_t dropout_step = 0;  ///< See objective::LocalBatch.
};

/// The pieces of one pass end to end, each padded as if it were alone, so that its products have
/// the same shapes there; with one entry of `adapters` for each.
objective::LocalBatch joint_batch(const assembly::Model& model, std::span<const Piece> pieces);

struct PieceSums {
  double loss = 0;
  std::vector<double> metrics;
};

/// Result of a head of all pieces of a pass: one gradient, and the loss of each piece, 0-d each.
struct PassHeadResult {
  at::Tensor grad_hidden;  ///< Undefined without gradients.
  std::vector<at::Tensor> losses;
};
/// An objective::HeadFunction on the rows of pass number `pass`.
using PassHead = std::function<PassHeadResult(std::size_t pass, const at::Tensor& hidden,
                                              const objective::LocalBatch& batch)>;

struct JointOptions {
  std::size_t metrics = 0;      ///< As many as every head sums.
  bool wants_gradients = true;  ///< False: forward only; heads then give no gradient either.
  PassHead pass_head = {};      ///< Unless empty, takes the place of the pieces' heads.
};

/// Runs passes of several pieces each, which no state connects: a piece's rows, gradients and sums
/// depend on it alone. Gradients are added to those of the pieces' sets. Returns the sums over all
/// ranks of each pass's pieces. All ranks call it with equally many passes of equally many pieces.
std::vector<std::vector<PieceSums>> run_joint_passes(assembly::ModelOnRanks& base,
                                                     std::span<const std::vector<Piece>> passes,
                                                     const JointOptions& options);

}  // namespace heddle::tenants
