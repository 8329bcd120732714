#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "adapters/lora.h"
#include "data/batch.h"
#include "models/model.h"
#include "parallel/pipeline.h"

namespace heddle::objective {

using models::Model;

/// Noise on embedded tokens in training, "NEFTune" (arXiv 2310.05914).
struct Neftune {
  double alpha = 0;       ///< 0: none.
  std::uint64_t key = 0;  ///< Key of its random numbers.
};

/// This rank's share of a micro-batch that all ranks along cp read.
struct LocalBatch {
  /// `set`: the adapters of all its rows; null: the base model. `dropout_step`, from 1: draws what
  /// they drop in it, if they drop anything, and the noise of its tokens.
  LocalBatch(const Model& model, const data::Batch& whole, const adapters::LoraSet* set = nullptr,
             std::uint64_t dropout_step = 0, const Neftune& neftune = {});

  data::Batch host;                                     ///< The rank's tokens, or all.
  data::Batch device;                                   ///< The batch on the model's device.
  std::shared_ptr<const ops::ContextParallel> context;  ///< Null if the rank has all tokens.
  std::vector<nn::AdaptedRows> adapters;                ///< See nn::Pass.
  /// [T] of the rank's tokens on the device: what their noise is drawn from and how large it is;
  /// undefined without noise.
  at::Tensor noise_draws, noise_scales;

  nn::Pass pass(const Model& model, bool training) const;
  /// Hidden states [T/tp,H] of this rank's embedded tokens, with their noise in training.
  at::Tensor embed(Model& model) const;
  /// Sizes of this rank's hidden states: [T/tp,H].
  std::vector<std::int64_t> hidden_sizes(const Model& model) const;
  /// Numbers in the whole batch, counted from 0, of the real sequences whose last token is here.
  std::vector<std::int64_t> sequences_ending_here() const;
  /// The number in the whole batch of the sequence that each of the rank's tokens belongs to.
  std::vector<std::int64_t> sequences_of_tokens() const;
  /// The place in the whole batch of each of the rank's tokens.
  std::vector<std::int64_t> places_of_tokens() const;

 private:
  void draw_noise(const Model& model, const data::Batch& whole, std::uint64_t step);

  Neftune neftune_;
  std::int64_t whole_sequences_;  ///< Real ones of the whole batch.
};

/// Tokens of the largest, as the ranks pad them; 0 without any.
std::int64_t largest_micro_batch(const Model& model, std::span<const data::Batch> batches);

/// Hidden states [T/tp,H] of a batch after the last layer, without gradients; undefined where the
/// last stage is elsewhere. `experts`: see Pipeline::evaluate.
at::Tensor evaluate_hidden(Model& model, parallel::Pipeline& pipeline, const LocalBatch& batch,
                           std::vector<at::Tensor>* experts = nullptr);

}  // namespace heddle::objective
