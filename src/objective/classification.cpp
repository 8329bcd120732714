#include "objective/classification.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "device/upload.h"
#include "objective/class_counts.h"
#include "objective/last_token.h"
#include "ops/autograd.h"

namespace heddle::objective {
namespace {

HeadResult classification(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                          double gradient_scale, bool want_gradients) {
  const auto wide = model.context().wide_dtype();
  if (batch.targets.empty()) {
    return {at::zeros({}, hidden.options().dtype(wide).requires_grad(false)),
            want_gradients ? at::zeros_like(hidden) : at::Tensor()};
  }
  at::Tensor trunk = ops::detached(hidden);
  if (want_gradients) trunk.set_requires_grad(true);
  at::Tensor logits;
  const auto forward = [&] {
    logits = model.score()
                 .forward(model.kernels(), model.final_norm(last_token_rows(model, trunk, batch)))
                 .to(wide);
    const bool is_regression = model.num_labels() == 1;
    // The dtype changes on the host: not every device has float64.
    const at::Tensor targets =
        device::upload(at::tensor(batch.targets, at::kDouble).to(is_regression ? wide : at::kLong),
                       hidden.device());
    if (is_regression) return at::mse_loss(logits.squeeze(1), targets, at::Reduction::Sum);
    return at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum);
  };
  if (!want_gradients) {
    const at::Tensor loss = ops::run_without_gradient(forward);
    HeadResult result;
    result.loss_sum = loss;
    result.outputs = logits;
    return result;
  }
  const at::Tensor loss = forward();
  ops::run_backward({loss}, {ops::run_without_gradient([&] {
                      return at::full({}, gradient_scale, loss.options().requires_grad(false));
                    })});
  return {ops::detached(loss), trunk.grad(), {}};
}

}  // namespace

std::vector<HeadFunction> Classification::heads(std::span<const data::Batch> micro_batches,
                                                const PassOptions& options) {
  Model& model = this->model();
  const HeadFunction head = [&model, options](const at::Tensor& hidden, const LocalBatch& batch) {
    return classification(model, hidden, batch.host, options.gradient_scale,
                          options.wants_gradients);
  };
  return std::vector<HeadFunction>(micro_batches.size(), head);
}

Evaluation Classification::evaluate(const std::shared_ptr<const data::Dataset>& rows,
                                    const data::EvaluationLoader::Options& loader_options) {
  const std::int64_t classes = model().num_labels();
  if (classes == 1) return Objective::evaluate(rows, loader_options);
  ClassCounts counts(classes);
  Evaluation evaluation =
      evaluate_and(rows, loader_options, [&](const HeadResult& result, const LocalBatch& batch) {
        if (!result.outputs.defined()) return;
        const at::Tensor best = at::argmax(result.outputs, 1).cpu();
        const std::int64_t* const guesses = best.const_data_ptr<std::int64_t>();
        for (std::size_t i = 0; i < batch.host.targets.size(); ++i) {
          counts.add(guesses[i], static_cast<std::int64_t>(batch.host.targets[i]));
        }
      });
  placed_.context.mesh.loss_group().all_reduce_sum(counts.table());
  evaluation.metrics.set(metric::kAccuracy, counts.accuracy());
  evaluation.metrics.set(metric::kMacroF1, counts.macro_f1());
  return evaluation;
}

}  // namespace heddle::objective
