#pragma once

#include "objective/local_batch.h"

namespace heddle::objective {

/// Request to `score`.
struct ScoreRequest {
  bool normalize_embedding = true;
  bool entropy = false;    ///< For a language model only.
  double temperature = 1;  ///< For a language model only: what logits are divided by.
};

/// Report of `score` on one micro-batch on one rank, without gradients.
struct ScoreResult {
  at::Tensor logprobs;  ///< Language model: [T/tp] of labels[t] given the tokens up to t; 0 where
                        ///< there is no label.
  at::Tensor entropy;   ///< [T/tp] of the distribution that labels[t] is judged by, in nats; 0
                        ///< where there is no label; undefined unless asked for.
  at::Tensor outputs;   ///< Classification: logits [S, num_labels]; embedding: [S, H].
};
/// `support` [T/tp,k] int64, for a language model: the tokens that the distribution of each label
/// of this rank's rows is over, then -1; rows with none are not scored, and have 0. Undefined: all
/// tokens.
ScoreResult score_head(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                       const ScoreRequest& request, const at::Tensor& support = {});

}  // namespace heddle::objective
