#include "objective/classification.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "device/upload.h"
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
  const auto forward = [&] {
    const at::Tensor logits =
        model.score()
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
  if (!want_gradients) return {ops::run_without_gradient(forward), {}, {}};
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

}  // namespace heddle::objective
