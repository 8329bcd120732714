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
    Known known{{}, token_weights(whole)};
    if (compares_with_reference(options_.loss))
      known.reference = reference_.logprobs(whole, options.is_held_out);
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
  TokenLogprobs logprobs(model(), hidden, rows, {.want_gradients = options.wants_gradients});
  const auto sequences = std::ssize(known.tokens);
  const SequenceSums sums = sums_of_rows(placed_.context, batch, rows, sequences);
  const at::Tensor policy = sums.of(logprobs.values()),
                   tokens = device::upload(at::tensor(known.tokens, policy.scalar_type()),
                                           hidden.device());
  // 0: the chosen answers, 1: the rejected ones.
  const auto answers = [&](std::int64_t which) {
    const auto of = [&](const at::Tensor& by_sequence) {
      return by_sequence.view({-1, 2}).select(1, which);
    };
    return AnswerLogprobs{
        of(policy), known.reference.defined() ? of(known.reference) : at::Tensor(), of(tokens)};
  };
  const DpoPairs pairs = dpo_loss(answers(0), answers(1), options_);
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
