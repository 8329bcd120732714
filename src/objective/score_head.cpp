#include "objective/score_head.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>

#include "device/upload.h"
#include "objective/last_token.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace heddle::objective {

using models::Head;

ScoreResult score_head(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                       const ScoreRequest& request) {
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
