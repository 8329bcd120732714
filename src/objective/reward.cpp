#include "objective/reward.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "device/upload.h"
#include "objective/last_token.h"
#include "objective/pair_loss.h"
#include "objective/sequence_sums.h"
#include "ops/autograd.h"

namespace heddle::objective {

std::vector<HeadFunction> Reward::heads(std::span<const data::Batch> micro_batches,
                                        const PassOptions& options) {
  std::vector<HeadFunction> functions;
  for (const data::Batch& whole : micro_batches) {
    const auto pairs = static_cast<std::int64_t>(count_pairs(whole));
    functions.push_back([this, options, pairs](const at::Tensor& hidden, const LocalBatch& batch) {
      return run(hidden, batch, pairs, options);
    });
  }
  return functions;
}

HeadResult Reward::run(const at::Tensor& hidden, const LocalBatch& batch, std::int64_t pairs,
                       const PassOptions& options) const {
  Model& model = this->model();
  const std::vector<std::int64_t> here = batch.sequences_ending_here();
  at::Tensor trunk = ops::detached(hidden), scores, index;
  if (options.wants_gradients) trunk.set_requires_grad(true);
  at::Tensor all = at::zeros(
      {2 * pairs}, trunk.options().dtype(sum_dtype(placed_.context)).requires_grad(false));
  if (!here.empty()) {
    const auto forward = [&] {
      return model.score()
          .forward(model.kernels(), model.final_norm(last_token_rows(model, trunk, batch.host)))
          .squeeze(1)
          .to(placed_.context.wide_dtype());
    };
    scores = options.wants_gradients ? forward() : ops::run_without_gradient(forward);
    index = device::upload(here, hidden.device());
    all.index_copy_(0, index, ops::detached(scores).to(all.scalar_type()));
  }
  placed_.context.mesh.group({comm::Dim::kCp}).all_reduce_sum(all);

  const ops::NoGradient guard;
  const at::Tensor by_pair = all.view({pairs, 2});
  const at::Tensor chosen = by_pair.select(1, 0), rejected = by_pair.select(1, 1);
  const RankingLoss loss = ranking_loss(chosen, rejected);
  HeadResult result{
      reported(loss.loss), {}, {reported(chosen > rejected), reported(chosen - rejected)}};
  if (!options.wants_gradients) return result;
  if (here.empty()) {
    result.grad_hidden = at::zeros_like(hidden);
    return result;
  }
  const at::Tensor d_chosen = options.gradient_scale * loss.d_chosen;
  const at::Tensor d_scores = at::stack({d_chosen, -d_chosen}, 1).view({2 * pairs});
  ops::run_backward({scores}, {d_scores.index_select(0, index).to(scores.scalar_type())});
  result.grad_hidden = trunk.grad();
  return result;
}

}  // namespace heddle::objective
