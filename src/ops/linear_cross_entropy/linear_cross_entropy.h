#pragma once

#include <functional>
#include <vector>

#include "ops/registry.h"

namespace heddle::ops {

struct LinearCrossEntropy {
  static constexpr const char* kName = "linear_cross_entropy";
  struct Dims {
    std::int64_t hidden_size = 0, vocab_size = 0;
  };
  /// A loss of tokens, each by itself, which is known once their log-probabilities are. Takes those
  /// [n] fp32 (fp64) of the rows from `first` on and returns d loss / d logprob [n], both on the
  /// device; rows come in order, each once. The kernel calls it between a chunk's logits and the
  /// gradients of that chunk, so it must not wait for the device.
  using TokenLoss = std::function<at::Tensor(std::int64_t first, const at::Tensor& logprobs)>;
  /// A low-rank change of the head for rows [first, first + n): low weight^T is added to their
  /// logits.
  struct Change {
    std::int64_t first = 0;
    at::Tensor low;     ///< [n,r]
    at::Tensor weight;  ///< [V,r]
  };
  struct ChangeGradient {
    at::Tensor low;     ///< [n,r]
    at::Tensor weight;  ///< [V,r] fp32 (fp64)
  };
  struct Inputs {
    at::Tensor hidden;  ///< [N,H]
    at::Tensor weight;  ///< [V,H]
    /// In the order of their rows, which do not overlap. Needs all_rows_labelled and no support.
    std::vector<Change> changes = {};
    at::Tensor labels;          ///< [N] int64, -100 = ignored
    at::Tensor loss_weights;    ///< [N] fp32 or wider; undefined = 1
    double gradient_scale = 1;  ///< The gradients are those of gradient_scale * loss_sum.
    /// If set, the gradients are those of its loss; loss_weights and gradient_scale are left out
    /// and all rows have a label.
    TokenLoss token_loss = {};
    /// [N] fp32 or wider: d loss / d entropy of each row, added to the gradients of the rest of the
    /// loss; undefined: the loss holds no entropy. Needs want_entropy and all_rows_labelled.
    at::Tensor entropy_gradients = {};
    /// No label is -100: a device need not be asked, and waited for, which rows to drop.
    bool all_rows_labelled = false;
    bool want_entropy = false;
    /// [N,k] int64: the tokens that a row's distribution is over, its label among them, then -1;
    /// undefined: the whole vocabulary. Needs all_rows_labelled; no logits are kept.
    at::Tensor support;
    /// For a loss of whole sequences, whose derivatives follow from the log-probabilities of all
    /// rows: a call without gradients leaves Result::logits, and the call with gradients of the
    /// same rows takes them.
    bool keep_logits = false;
    at::Tensor logits;  ///< Kept ones, which are used up; undefined: computed again.
    /// Dtype of a grad_weight that is not added to a buffer; Undefined: the weight's.
    c10::ScalarType gradient_dtype = c10::ScalarType::Undefined;

    /// Options of a new grad_weight.
    at::TensorOptions gradient_options() const;
    /// Part of the gradients by the logits that entropy_gradients make, of the rows from `first`
    /// on: -entropy_gradient p (log p + entropy), of `p` and `log_p` [n,V] and `entropy` [n].
    at::Tensor entropy_part(std::int64_t first, const at::Tensor& p, const at::Tensor& log_p,
                            const at::Tensor& entropy) const;
    /// [n,1] factors of softmax - one_hot(label) in the gradients by the logits of the rows from
    /// `first` on, by token_loss.
    at::Tensor token_factors(std::int64_t first, const at::Tensor& logprobs) const;
  };
  struct Result {
    at::Tensor loss_sum;     ///< 0-d fp32 (fp64): sum of loss weight x cross-entropy (not scaled).
    at::Tensor logprobs;     ///< [N] fp32 (fp64): log p(label); 0 where ignored.
    at::Tensor entropy;      ///< [N] fp32 (fp64): -sum over the vocabulary of p log p, in nats; 0
                             ///< where ignored; undefined unless asked for.
    at::Tensor logits;       ///< All rows with a label, if they are one chunk; undefined else,
                             ///< or unless kept.
    at::Tensor grad_hidden;  ///< [N,H], zero where ignored; undefined unless asked for.
    at::Tensor grad_weight;  ///< [V,H]: the buffer that was given, or a new one; undefined unless
                             ///< asked for.
    /// One a change, in their order; empty unless grad_hidden was asked for.
    std::vector<ChangeGradient> grad_changes = {};
  };
  struct Functions {
    /// Forward and gradients in one pass over row chunks: the loss is linear in its gradient, so
    /// nothing needs to wait for the backward. Ignored rows are dropped first.
    /// `grad_weight_buffer`, if defined, is added to; else a new one takes the gradient.
    Result (*forward)(const Inputs&, bool want_grad_hidden, bool want_grad_weight,
                      at::Tensor& grad_weight_buffer);
  };
};

/// Cross-entropy of the language-model head without ever holding all logits: at most `chunk` rows
/// of [V] at a time. Not recorded by autograd: the caller feeds grad_hidden into the backward of
/// the trunk.
LinearCrossEntropy::Result linear_cross_entropy(const KernelTable& kernels,
                                                const LinearCrossEntropy::Inputs& inputs,
                                                bool want_grad_hidden, bool want_grad_weight,
                                                at::Tensor grad_weight_buffer = {});

}  // namespace heddle::ops
