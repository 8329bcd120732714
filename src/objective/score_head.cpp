#include "objective/score_head.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/zeros.h>

#include "device/upload.h"
#include "objective/last_token.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace heddle::objective {

using models::Head;

namespace {

/// Scores of the rows that have a support.
ScoreResult score_over(Model& model, ops::LinearCrossEntropy::Inputs inputs,
                       const at::Tensor& support) {
  const auto wide = inputs.hidden.options().dtype(model.context().wide_dtype());
  const std::int64_t rows = inputs.hidden.size(0);
  ScoreResult result;
  result.logprobs = at::zeros({rows}, wide);
  if (inputs.want_entropy) result.entropy = at::zeros({rows}, wide);
  const at::Tensor with = at::nonzero(support.select(1, 0).ge(0)).squeeze(1);
  if (with.numel() == 0) return result;
  inputs.hidden = inputs.hidden.index_select(0, with);
  inputs.labels = inputs.labels.index_select(0, with);
  inputs.support = support.index_select(0, with);
  inputs.all_rows_labelled = true;
  const auto scored = ops::linear_cross_entropy(model.kernels(), inputs, false, false);
  const auto put = [&](at::Tensor& all, const at::Tensor& found) {
    all.index_copy_(0, with, found.to(all.scalar_type()));
  };
  put(result.logprobs, scored.logprobs);
  if (inputs.want_entropy) put(result.entropy, scored.entropy);
  return result;
}

}  // namespace

ScoreResult score_head(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                       const ScoreRequest& request, const at::Tensor& support) {
  const ops::NoGradient guard;
  const auto wide = model.context().wide_dtype();
  ScoreResult result;
  if (model.head() == Head::kLanguageModel) {
    const ops::Rows own = ops::own_rows(batch.size(), model.tensor_group());
    ops::LinearCrossEntropy::Inputs inputs;
    inputs.hidden = model.final_norm(hidden);
    if (request.temperature != 1) inputs.hidden = inputs.hidden / request.temperature;
    inputs.weight = model.head_weight().data();
    inputs.labels = device::upload(batch.labels.narrow(0, own.first, own.count), hidden.device());
    inputs.want_entropy = request.entropy;
    if (support.defined()) return score_over(model, inputs, support);
    const auto scored = ops::linear_cross_entropy(model.kernels(), inputs, false, false);
    result.logprobs = scored.logprobs;
    result.entropy = scored.entropy;
    return result;
  }
  const at::Tensor last = model.final_norm(last_token_rows(model, hidden, batch));
  if (model.head() == Head::kClassify) {
    result.outputs = model.score().forward(model.kernels(), last).to(wide);
  } else {
    result.outputs = last.to(wide);
    if (request.normalize_embedding) {
      result.outputs =
          result.outputs / at::linalg_vector_norm(result.outputs, 2, {-1}, true).clamp_min(1e-12);
    }
  }
  return result;
}

}  // namespace heddle::objective
