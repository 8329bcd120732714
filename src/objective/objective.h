#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "assembly/model_on_ranks.h"
#include "data/loader/dataset.h"
#include "data/loader/loader.h"
#include "objective/evaluation.h"
#include "objective/local_batch.h"

namespace heddle::objective {

/// Result of the head on one micro-batch.
struct HeadResult {
  at::Tensor loss_sum;     ///< 0-d, fp32 (fp64): sum of loss weight x loss, not divided.
  at::Tensor grad_hidden;  ///< [T/tp,H], of gradient_scale x loss_sum; undefined without gradients.
  /// 0-d like loss_sum, in the order of Objective::metrics(), not divided; in evaluation those
  /// alone that need no gradient.
  std::vector<at::Tensor> metric_sums = {};
  at::Tensor outputs = {};  ///< Classification without gradients: logits [S, num_labels].
};

/// Final norm, head and loss on the rank's hidden states [T/tp,H] of one micro-batch, forward and
/// backward at once; adds to the gradients of norm and head.
using HeadFunction = std::function<HeadResult(const at::Tensor& hidden, const LocalBatch&)>;

/// Data sets of a run; `eval` may be null.
struct RunRows {
  std::shared_ptr<const data::Dataset> train, eval;
};

struct PassOptions {
  double gradient_scale = 1;  ///< Gradients are those of gradient_scale x loss_sum.
  bool wants_gradients = true;
  std::uint64_t dropout_step = 0;  ///< See LocalBatch.
  bool is_held_out = false;        ///< The rows are those of RunRows::eval.
};

/// A run's subject: a loss that is a sum over rows, its divisor and metrics. Every rank has one
/// of its own over its part of the model; all ranks call it together. A loss may span the tokens of
/// a sequence, the sequences of a row or, in heads(), all micro-batches of a step.
class Objective {
 public:
  explicit Objective(const assembly::ModelOnRanks& placed) : placed_(placed) {}
  virtual ~Objective() = default;
  Objective(const Objective&) = delete;
  Objective& operator=(const Objective&) = delete;

  /// The figures of HeadResult::metric_sums, means like the loss.
  virtual std::vector<const Metric*> metrics() const { return {}; }
  /// Divisor of a step's sums over all ranks: its rows.
  virtual double divisor(const data::Step& step) const;
  /// The part of the divisor that belongs to what this rank has of a micro-batch.
  virtual double weight(const data::Batch& local) const = 0;
  /// The loss is a sum over tokens, each by itself: LanguageModel. Then LossRows are all that a
  /// step must know, which can be queued and recorded.
  virtual bool is_sum_over_tokens() const { return false; }

  /// Computes what must be known before the first step, with the weights as they are when a run
  /// starts (not those of a checkpoint that it continues).
  virtual void prepare(const RunRows& rows) {}

  /// One function a micro-batch of a step. Computes what must be known before the step.
  virtual std::vector<HeadFunction> heads(std::span<const data::Batch> micro_batches,
                                          const PassOptions& options) = 0;

  /// Loss and metrics of held-out rows; loader_options.rank and world are the data ranks'.
  virtual Evaluation evaluate(const std::shared_ptr<const data::Dataset>& rows,
                              const data::EvaluationLoader::Options& loader_options);

 protected:
  /// evaluate(), with each result of the head and its part of the rows handed to `use`.
  using UseResult = std::function<void(const HeadResult&, const LocalBatch&)>;
  Evaluation evaluate_and(const std::shared_ptr<const data::Dataset>& rows,
                          const data::EvaluationLoader::Options& loader_options,
                          const UseResult& use);
  Model& model() const { return *placed_.model; }

  const assembly::ModelOnRanks& placed_;
};

}  // namespace heddle::objective
