#include "objective/preference.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <numeric>

#include "device/upload.h"
#include "objective/language_model.h"
#include "objective/sequence_sums.h"

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
  const auto sequences = std::ssize(known.tokens);
  const SequenceSums sums = sums_of_rows(placed_.context, batch, rows, sequences);
  // [2,P]: those of the chosen answers, then those of the rejected ones.
  const auto by_answer = [](const at::Tensor& by_sequence) {
    return by_sequence.view({-1, 2}).t();
  };
  const at::Tensor policy = by_answer(sums.of(logprobs.values())),
                   reference = by_answer(known.reference),
                   tokens = by_answer(device::upload(at::tensor(known.tokens, policy.scalar_type()),
                                                     hidden.device()));
  const DpoPairs pairs = dpo_loss({policy[0], reference[0], tokens[0]},
                                  {policy[1], reference[1], tokens[1]}, options_);
  HeadResult result{reported(pairs.loss), {}, {}};
  result.metric_sums = {reported(pairs.reward_margin), reported(pairs.reward_margin > 0),
                        reported(pairs.logp_chosen), reported(pairs.logp_rejected)};
  if (!options.wants_gradients) return result;
  const at::Tensor d_sums =
      options.gradient_scale * at::stack({pairs.d_chosen, pairs.d_rejected}, 1).view({sequences});
  result.grad_hidden = logprobs.gradient(sums.gradient(d_sums).to(logprobs.values().scalar_type()));
  return result;
}

}  // namespace heddle::objective
