#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "data/batch.h"
#include "models/qwen3_5/model.h"
#include "train/contrastive.h"

namespace heddle::train {

using models::qwen3_5::Model;

struct HeadResult {
  at::Tensor loss_sum;     ///< 0-d, fp32 (fp64): sum of loss weight x loss, not divided.
  at::Tensor grad_hidden;  ///< [T,H], of gradient_scale x loss_sum; undefined without gradients.
};

/// The rows of a micro-batch that a language model's loss is made of, on the model's device.
struct LossRows {
  LossRows() = default;
  /// Those of `batch`, which is on the host, that have a label and a weight; `multiple`: their
  /// number is rounded up to one by rows of weight 0 (but to no more than all rows), for launches
  /// that serve several batches. Gradients are those of gradient_scale * loss_sum.
  LossRows(const Model& model, const data::Batch& batch, double gradient_scale,
           std::int64_t multiple = 1);

  at::Tensor index;                           ///< [n] int64 into the rows; undefined: every row.
  at::Tensor labels;                          ///< [n] int64
  at::Tensor loss_weights, gradient_weights;  ///< [n], fp32 or wider
};

/// run_head of a language model with the rows given.
HeadResult run_language_model_head(Model& model, const at::Tensor& hidden, const LossRows& rows,
                                   bool want_gradients);

/// Final norm, head and loss on the hidden states [T,H] of one micro-batch (tensors of `batch` on
/// the host or the device), forward and backward at once; accumulates the gradients of norm and
/// head. Language model: cross-entropy of the labelled rows, of which each rank along tp computes a
/// run; loss and hidden gradient are whole on each. Classification: cross-entropy, or
/// squared error with one label, of each sequence's last token against its target. An embedding's
/// loss spans micro-batches: see train_embed_head.
HeadResult run_head(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                    double gradient_scale, bool want_gradients);

/// Embeddings of each sequence's last token after the final norm, [S,H].
at::Tensor embed_head(Model& model, const at::Tensor& hidden, const data::Batch& batch);

/// Forward and backward of an embedding head: `loss` turns the embeddings [S,H] of the batch into a
/// sum and its gradient, which goes on to the hidden states and the norm.
HeadResult train_embed_head(
    Model& model, const at::Tensor& hidden, const data::Batch& batch,
    const std::function<ContrastiveResult(const at::Tensor& embeddings)>& loss);

/// What `score` reports of one micro-batch, without gradients.
struct ScoreResult {
  at::Tensor logprobs;  ///< Language model: [T] of labels[t] given the tokens up to t; 0 where
                        ///< there is no label.
  at::Tensor outputs;   ///< Classification: logits [S, num_labels]; embedding: [S, H].
};
ScoreResult score_head(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                       bool normalize_embedding);

/// Hidden states of each real sequence's last token, found through cu_seqlens. [S,H],
/// differentiable.
at::Tensor last_token_rows(const at::Tensor& hidden, const data::Batch& batch);

}  // namespace heddle::train
