#pragma once

#include <optional>
#include <vector>

#include "objective/loss_rows.h"
#include "objective/objective.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace heddle::objective {

/// Cross-entropy of the next token, weighted. Divided by the sum of loss weights.
class LanguageModel : public Objective {
 public:
  using Objective::Objective;
  std::vector<const Metric*> metrics() const override { return {&metric::kEntropy}; }
  double divisor(const data::Step& step) const override { return step.loss_weight_sum; }
  double weight(const data::Batch& local) const override { return local.loss_weight_sum; }
  bool is_sum_over_tokens() const override { return true; }
  std::vector<HeadFunction> heads(std::span<const data::Batch> micro_batches,
                                  const PassOptions& options) override;
};

/// Loss and, with gradients, entropy of the predicted distributions as the only metric: of all T
/// tokens, of which each rank along tp computes equally many. Gradients are those of
/// rows.gradient_weights.
HeadResult run_language_model_head(Model& model, const at::Tensor& hidden, const LossRows& rows,
                                   bool want_gradients);

/// run_language_model_head as the head of one micro-batch after the other.
HeadFunction language_model_head(Model& model, double gradient_scale, bool want_gradients = true);

/// Numbers [n] of this rank's run of rows, and the gradient [T/tp,H] of the hidden states.
struct TokenLossResult {
  at::Tensor logprobs;
  at::Tensor entropy;      ///< The distributions', in nats.
  at::Tensor grad_hidden;  ///< Undefined without gradients.
};

/// A loss of tokens, each by itself, in one pass over chunks of logits: `loss` takes the
/// log-probabilities of each chunk's rows, counted in this rank's run, and gives the loss's
/// derivatives by them. Adds the gradients of norm and head. Without gradients it is called once,
/// after the pass. All ranks along tp call together. The distributions are those of the logits
/// divided by `temperature`. `entropy_gradients` [n]: the loss's derivatives by the entropies;
/// undefined: it holds none.
TokenLossResult run_token_loss(Model& model, const at::Tensor& hidden, const LossRows& rows,
                               const ops::LinearCrossEntropy::TokenLoss& loss, bool want_gradients,
                               double temperature, const at::Tensor& entropy_gradients = {});

/// Consecutive rows of a head and the adapter that changes it for them, null for none.
struct ChangedHeadRows {
  nn::LowRank* change = nullptr;
  std::int64_t rows = 0;
};

/// Log-probabilities of a micro-batch's labels, for losses of whole sequences: first their
/// values, then, from the derivative of the loss by each, the gradients. A head that is trained, or
/// has an adapter, keeps the logits in between if they are one chunk of the kernel's, else computes
/// them twice; a frozen one keeps the gradient of each row by its log-probability instead, unless
/// the loss holds the entropies.
class TokenLogprobs {
 public:
  struct Options {
    bool want_gradients = false;
    bool want_entropy = false;
    double temperature = 1;  ///< The distributions are those of the logits divided by it.
    /// [n,k] int64: the tokens that each is over, then -1; undefined: all tokens.
    at::Tensor support = {};
    /// [n]: the loss's derivatives by the entropies, which want_entropy gives; undefined: it holds
    /// none.
    at::Tensor entropy_gradients = {};
    std::vector<ChangedHeadRows> changed = {};  ///< All rows in order; empty: no adapters.
    /// [n]: the derivatives that gradient() will be given, if they are known before: a frozen head
    /// with adapters then needs one pass. Undefined: they follow from the values.
    at::Tensor known_derivatives = {};
  };
  /// On hidden states [T/tp,H]. All ranks along tp make theirs together.
  TokenLogprobs(Model& model, const at::Tensor& hidden, const LossRows& rows, Options options);

  /// [n] of this rank's run of rows.
  const at::Tensor& values() const { return values_; }
  /// [n] of the distributions, in nats; undefined unless asked for.
  const at::Tensor& entropy() const { return entropy_; }
  /// From d loss / d values [n] the gradient [T/tp,H] of the hidden states; adds those of norm,
  /// head and its adapters. At most once, by all ranks along tp together.
  at::Tensor gradient(const at::Tensor& d_values);

 private:
  /// The changes of the head with what they make of the normalized rows, recorded if there will be
  /// gradients.
  void change_rows();
  /// Gradients that the head's weight does not take.
  struct Gradients {
    at::Tensor normalized;
    std::vector<ops::LinearCrossEntropy::ChangeGradient> changes;
  };
  /// The operator's inputs for values, entropies or their gradients.
  ops::LinearCrossEntropy::Inputs head_inputs() const;
  Gradients gradients_of(const at::Tensor& d_values);

  Model& model_;
  const LossRows& rows_;
  Options options_;
  at::Tensor trunk_, normalized_, values_, entropy_;
  std::vector<ops::LinearCrossEntropy::Change> changes_;  ///< One for each adapted run of rows.
  at::Tensor unit_gradient_;  ///< [n,H] of the sum of -values; undefined where the head is trained
                              ///< or changed.
  at::Tensor logits_;         ///< Where the head is trained, of one chunk.
  std::optional<Gradients> known_;  ///< By Options::known_derivatives.
};

}  // namespace heddle::objective
