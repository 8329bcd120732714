#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "data/batch.h"
#include "models/model.h"
#include "train/contrastive.h"

namespace heddle::train {

using models::Model;

struct HeadResult {
  at::Tensor loss_sum;     ///< 0-d, fp32 (fp64): sum of loss weight x loss, not divided.
  at::Tensor grad_hidden;  ///< [T/tp,H], of gradient_scale x loss_sum; undefined without gradients.
  at::Tensor entropy_sum;  ///< Language model in training: 0-d like loss_sum, of loss weight x
                           ///< entropy of the predicted distribution; else undefined.
};

/// The rows of a micro-batch that a language model's loss is made of, on the model's device, and
/// how the ranks along tp divide them: each takes a run of ceil(n / tp) of all n to the head, the
/// last ones less or none, as prompts without labels may fill the rows of one rank.
struct LossRows {
  LossRows() = default;
  /// Those of `batch`, which is on the host, that have a label and a weight; `multiple`: their
  /// number is rounded up to one by rows of weight 0 (but to no more than all rows), for launches
  /// that serve several batches. Gradients are those of gradient_scale * loss_sum.
  LossRows(const Model& model, const data::Batch& batch, double gradient_scale,
           std::int64_t multiple = 1);

  std::int64_t total = 0;  ///< n, of all ranks along tp.
  at::Tensor index;        ///< int64 into this rank's rows [T/tp]; undefined: every row.
  std::vector<std::int64_t> sent, received;  ///< [tp], of the indexed rows; empty: none moves.
  // Of this rank's run.
  at::Tensor labels;                          ///< int64
  at::Tensor loss_weights, gradient_weights;  ///< fp32 or wider
};

/// run_head of a language model with the rows given.
HeadResult run_language_model_head(Model& model, const at::Tensor& hidden, const LossRows& rows,
                                   bool want_gradients);

/// Final norm, head and loss on the rank's hidden states [T/tp,H] of one micro-batch of T tokens
/// (tensors of `batch` on the host or the device), forward and backward at once; accumulates the
/// gradients of norm and head. The loss is that of all T. Language model: cross-entropy of the
/// labelled rows, of which each rank along tp computes equally many. Classification: cross-entropy,
/// or squared error with one label, of each sequence's last token against its target. An
/// embedding's loss spans micro-batches: see train_embed_head.
HeadResult run_head(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                    double gradient_scale, bool want_gradients);

/// Embeddings of each sequence's last token after the final norm, [S,H].
at::Tensor embed_head(Model& model, const at::Tensor& hidden, const data::Batch& batch);

/// Forward and backward of an embedding head: `loss` turns the embeddings [S,H] of the batch into a
/// sum and its gradient, which goes on to the hidden states and the norm.
HeadResult train_embed_head(
    Model& model, const at::Tensor& hidden, const data::Batch& batch,
    const std::function<ContrastiveResult(const at::Tensor& embeddings)>& loss);

/// What `score` is asked for.
struct ScoreRequest {
  bool normalize_embedding = true;
  bool entropy = false;  ///< Of a language model.
};

/// What `score` reports of one micro-batch on one rank, without gradients.
struct ScoreResult {
  at::Tensor logprobs;  ///< Language model: [T/tp] of labels[t] given the tokens up to t; 0 where
                        ///< there is no label.
  at::Tensor entropy;   ///< [T/tp] of the distribution that labels[t] is judged by, in nats; 0
                        ///< where there is no label; undefined unless asked for.
  at::Tensor outputs;   ///< Classification: logits [S, num_labels]; embedding: [S, H].
};
ScoreResult score_head(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                       const ScoreRequest& request);

/// Hidden states of each real sequence's last token, found through cu_seqlens, from the rows of the
/// ranks along tp. [S,H] on each of them, differentiable.
at::Tensor last_token_rows(const Model& model, const at::Tensor& hidden, const data::Batch& batch);

}  // namespace heddle::train
