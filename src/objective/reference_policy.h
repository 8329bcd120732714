#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "objective/objective.h"

namespace heddle::objective {

struct ReferenceOptions {
  std::filesystem::path directory;      ///< Where log-probabilities are kept.
  std::int64_t micro_batch_tokens = 0;  ///< A pass that computes them takes at most so many.
};

/// The policy that preference tuning starts from. With new adapters on a frozen model it is the
/// model without them, run on each micro-batch. Where weights of the model itself are trained, or
/// an adapter goes on, the log-probabilities of all rows are computed before the first step, with
/// the weights of model.path and adapter.path, and kept in
/// DIRECTORY/reference_logprobs_{train,eval}.safetensors: an interrupted run, and the next one on
/// the same model and rows, find them there.
class ReferencePolicy {
 public:
  ReferencePolicy(const assembly::ModelOnRanks& placed, ReferenceOptions options);

  /// Called by all ranks while the weights are the reference's.
  void prepare(const RunRows& rows);
  /// Sums [S] over the tokens of each real sequence of a micro-batch of loss weight x log p, on the
  /// device; undefined where the last stage is elsewhere. Called by all ranks that share the
  /// micro-batch.
  at::Tensor logprobs(const data::Batch& whole, bool is_held_out) const;

 private:
  at::Tensor compute(const data::Batch& whole) const;
  /// [rows, 2] of a whole data set.
  at::Tensor compute_all(const std::shared_ptr<const data::Dataset>& rows) const;
  at::Tensor read_or_compute(const std::string& name,
                             const std::shared_ptr<const data::Dataset>& rows) const;

  const assembly::ModelOnRanks& placed_;
  ReferenceOptions options_;
  bool is_base_model_;  ///< Without its adapters the model is the reference.
  at::Tensor train_, held_out_;
};

}  // namespace heddle::objective
