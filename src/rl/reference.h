#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "ckpt/training_checkpoint.h"
#include "config/run_config.h"
#include "train/scorer.h"
#include "train/setup.h"

namespace heddle::rl {

/// The policy that rl.reference holds the one in training to: the model that the run started from,
/// or with rl.reference.sync_every the policy as it was after every so many steps. All ranks call
/// it together.
///
///     fixed, with new LoRA  the base model, which is there already
///     fixed, of adapter.path, or following
///                           values of what is trained, divided over the ranks as the policy's own;
///                           while the reference scores they are exchanged with the policy's
///     fixed, otherwise      a frozen second model of the same files
class Reference {
 public:
  Reference(const config::RunConfig& config, train::Setup& setup);

  /// Scores of rows by a model, with its adapters or as if it had none.
  using Score = std::function<std::vector<train::RowScore>(const assembly::ModelOnRanks&,
                                                           bool with_adapters)>;
  /// The reference's scores, found by `score`.
  std::vector<train::RowScore> scores(const Score& score);
  /// After step `step`, from 1, of the policy.
  void updated(std::int64_t step);

  /// See train::StepSource::state.
  std::vector<ckpt::TensorPart> state(bool with_copies) const;
  /// Step whose policy it is; 0: it is the model that the run started from.
  std::int64_t step() const { return step_; }
  /// Goes on from tensors that state() named.
  void restored(std::int64_t step) { step_ = step; }

 private:
  bool follows() const { return every_ > 0; }
  /// Whether it has values of its own for what is trained.
  bool keeps_values() const { return follows() || setup_.placed.start != nullptr; }
  void place_frozen(const config::RunConfig& config);
  void exchange();

  std::int64_t every_, step_ = 0;
  train::Setup& setup_;
  std::unique_ptr<assembly::ModelOnRanks> frozen_;
  std::vector<at::Tensor> kept_;  ///< [trainable] owned rows.
};

}  // namespace heddle::rl
