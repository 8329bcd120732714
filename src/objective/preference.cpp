#include "objective/preference.h"

#include <ATen/ops/tensor.h>

#include <array>
#include <numeric>

#include "device/upload.h"
#include "objective/language_model.h"
#include "ops/autograd.h"

namespace heddle::objective {
namespace {

/// Sums of loss weights by real sequence.
std::vector<double> token_weights(const data::Batch& whole) {
  const auto* weights = whole.loss_weights.const_data_ptr<float>();
  std::vector<double> sums;
  for (std::int64_t s = 0; s < whole.real_sequences; ++s) {
    const auto i = static_cast<std::size_t>(s);
    sums.push_back(std::accumulate(weights + whole.cu_seqlens_host[i],
                                   weights + whole.cu_seqlens_host[i + 1], 0.0));
  }
  return sums;
}

/// Derivatives by the log-probabilities of this rank's tokens, from those by the sequences' sums.
std::vector<double> spread(const std::vector<double>& d_sums, const LocalBatch& batch,
                           const LossRows& rows) {
  const std::vector<std::int64_t> sequence = batch.sequences_of_tokens();
  const auto* weight = batch.host.loss_weights.const_data_ptr<float>();
  std::vector<double> d_values;
  for (const std::int64_t token : rows.tokens) {
    const auto t = static_cast<std::size_t>(token);
    d_values.push_back(weight[t] * d_sums[static_cast<std::size_t>(sequence[t])]);
  }
  return d_values;
}

}  // namespace

std::vector<HeadFunction> Preference::heads(std::span<const data::Batch> micro_batches,
                                            const PassOptions& options) {
  std::vector<HeadFunction> functions;
  for (const data::Batch& whole : micro_batches) {
    count_pairs(whole);
    Known known{reference_.logprobs(whole, options.is_held_out), token_weights(whole)};
    functions.push_back([this, options, known = std::move(known)](const at::Tensor& hidden,
                                                                  const LocalBatch& batch) {
      return run(hidden, batch, known, options);
    });
  }
  return functions;
}

HeadResult Preference::run(const at::Tensor& hidden, const LocalBatch& batch, const Known& known,
                           const PassOptions& options) const {
  const LossRows rows(model(), batch.host, 1);
  TokenLogprobs logprobs(model(), hidden, rows, options.wants_gradients);
  std::vector<double> policy =
      sequence_sums(batch, rows, logprobs.values(), known.reference.size());
  sum_over_ranks(placed_.context.mesh, {comm::Dim::kTp, comm::Dim::kCp}, policy);

  double loss = 0;
  std::array<double, 4> metrics = {};
  std::vector<double> d_sums(policy.size());
  for (std::size_t i = 0; i < policy.size(); i += 2) {
    const auto answer = [&](std::size_t s) {
      return AnswerLogprob{policy[s], known.reference[s], known.tokens[s]};
    };
    const DpoPairLoss pair = dpo_loss(answer(i), answer(i + 1), options_);
    loss += pair.loss;
    metrics[0] += pair.reward_margin;
    metrics[1] += pair.reward_margin > 0;
    metrics[2] += pair.logp_chosen;
    metrics[3] += pair.logp_rejected;
    d_sums[i] = options.gradient_scale * pair.d_chosen;
    d_sums[i + 1] = options.gradient_scale * pair.d_rejected;
  }
  const auto reported = [&](double sum) { return number(reports() ? sum : 0); };
  HeadResult result{reported(loss), {}, {}};
  for (const double sum : metrics) result.metric_sums.push_back(reported(sum));
  if (!options.wants_gradients) return result;
  const at::Tensor d_values =
      at::tensor(spread(d_sums, batch, rows), at::kDouble).to(logprobs.values().scalar_type());
  result.grad_hidden = logprobs.gradient(device::upload(d_values, hidden.device()));
  return result;
}

}  // namespace heddle::objective
