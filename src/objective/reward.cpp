#include "objective/reward.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include "device/upload.h"
#include "objective/last_token.h"
#include "objective/pair_loss.h"
#include "ops/autograd.h"

namespace heddle::objective {

std::vector<HeadFunction> Reward::heads(std::span<const data::Batch> micro_batches,
                                        const PassOptions& options) {
  std::vector<HeadFunction> functions;
  for (const data::Batch& whole : micro_batches) {
    functions.push_back([this, options, pairs = count_pairs(whole)](const at::Tensor& hidden,
                                                                    const LocalBatch& batch) {
      return run(hidden, batch, pairs, options);
    });
  }
  return functions;
}

HeadResult Reward::run(const at::Tensor& hidden, const LocalBatch& batch, std::size_t pairs,
                       const PassOptions& options) const {
  Model& model = this->model();
  const std::vector<std::int64_t> here = batch.sequences_ending_here();
  at::Tensor trunk = ops::detached(hidden), scores;
  if (options.wants_gradients) trunk.set_requires_grad(true);
  std::vector<double> all(2 * pairs);
  if (!here.empty()) {
    const auto forward = [&] {
      return model.score()
          .forward(model.kernels(), model.final_norm(last_token_rows(model, trunk, batch.host)))
          .squeeze(1)
          .to(placed_.context.wide_dtype());
    };
    scores = options.wants_gradients ? forward() : ops::run_without_gradient(forward);
    const at::Tensor host = ops::detached(scores).cpu().to(at::kDouble);
    for (std::size_t i = 0; i < here.size(); ++i)
      all[static_cast<std::size_t>(here[i])] = host.const_data_ptr<double>()[i];
  }
  sum_over_ranks(placed_.context.mesh, {comm::Dim::kCp}, all);

  double loss = 0, right = 0, margin = 0;
  std::vector<double> d_scores(2 * pairs);
  for (std::size_t i = 0; i < pairs; ++i) {
    const double chosen = all[2 * i], rejected = all[2 * i + 1];
    const RankingLoss pair = ranking_loss(chosen, rejected);
    loss += pair.loss;
    right += chosen > rejected;
    margin += chosen - rejected;
    d_scores[2 * i] = options.gradient_scale * pair.d_chosen;
    d_scores[2 * i + 1] = -d_scores[2 * i];
  }
  const ops::NoGradient guard;
  const auto reported = [&](double sum) { return number(reports() ? sum : 0); };
  HeadResult result{reported(loss), {}, {reported(right), reported(margin)}};
  if (!options.wants_gradients) return result;
  if (here.empty()) {
    result.grad_hidden = at::zeros_like(hidden);
    return result;
  }
  std::vector<double> own;
  for (const std::int64_t sequence : here)
    own.push_back(d_scores[static_cast<std::size_t>(sequence)]);
  ops::run_backward({scores}, {device::upload(at::tensor(own, at::kDouble).to(scores.scalar_type()),
                                              hidden.device())});
  result.grad_hidden = trunk.grad();
  return result;
}

}  // namespace heddle::objective
