#include "objective/policy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "device/upload.h"
#include "objective/language_model.h"
#include "objective/sequence_sums.h"
#include "objective/support_table.h"
#include "ops/autograd.h"

namespace heddle::objective {
namespace {

/// The supports of the labels of `rows` as TokenLogprobs takes them; undefined without any.
at::Tensor support_of(const Supports& supports, const LocalBatch& batch, const LossRows& rows,
                      c10::Device device) {
  if (supports.empty() || rows.tokens.empty()) return {};
  const std::vector<std::int64_t> places = batch.places_of_tokens();
  std::vector<std::int64_t> own;
  for (const std::int64_t token : rows.tokens)
    own.push_back(places[static_cast<std::size_t>(token)]);
  return support_table(supports, own, device);
}

/// Appends a row's column to that of the batch, from token `first` on.
template <class Entry>
void put(std::vector<Entry>& column, const std::vector<Entry>& row, std::int64_t first,
         std::int64_t tokens) {
  if (row.empty()) return;
  if (column.empty()) column.resize(static_cast<std::size_t>(tokens));
  std::copy(row.begin(), row.end(), column.begin() + first);
}

/// PolicyTokens::depth of the labels of a sequence's tokens, each the token after it.
std::vector<double> depths(std::int64_t tokens, std::int64_t longest) {
  std::vector<double> depths;
  for (std::int64_t t = 1; t <= tokens; ++t)
    depths.push_back(static_cast<double>(std::min(kDepths - 1, t * kDepths / longest)));
  return depths;
}

}  // namespace

double Policy::divisor(const data::Step& step) const {
  if (step.loss_rows == 0) return 1;  // all completions are masked: the sum is 0
  return divisor_of(options_.mean, static_cast<double>(step.loss_rows),
                    static_cast<double>(step.sequences));
}

Policy::Columns Policy::columns_of(const data::Batch& whole) const {
  Columns columns;
  for (std::vector<double>* column :
       {&columns.advantages, &columns.sequence_tokens, &columns.first_advantage})
    column->resize(static_cast<std::size_t>(whole.size()));
  const auto* mask = whole.loss_weights.const_data_ptr<float>();
  for (std::int64_t s = 0; s < whole.real_sequences; ++s) {
    const auto i = static_cast<std::size_t>(s);
    const std::int64_t first = whole.cu_seqlens_host[i];
    const PolicyRow& row = rows_.at(static_cast<std::size_t>(whole.row_ids[i]));
    if (std::ssize(row.advantages) != whole.cu_seqlens_host[i + 1] - first)
      throw_error<InternalError>("row {} has {} advantages, its sequence {} tokens",
                                 whole.row_ids[i], row.advantages.size(),
                                 whole.cu_seqlens_host[i + 1] - first);
    put(columns.old, row.old, first, whole.size());
    put(columns.behaviour, row.behaviour, first, whole.size());
    put(columns.reference, row.reference, first, whole.size());
    put(columns.age, row.age, first, whole.size());
    put(columns.advantages, row.advantages, first, whole.size());
    if (options_.longest_sequence > 0)
      put(columns.depth, depths(std::ssize(row.advantages), options_.longest_sequence), first,
          whole.size());
    put(columns.supports, row.supports, first, whole.size());
    const std::int64_t last = whole.cu_seqlens_host[i + 1];
    const auto chosen = std::count_if(mask + first, mask + last, [](float x) { return x != 0; });
    const auto first_chosen =
        std::find_if(mask + first, mask + last, [](float x) { return x != 0; });
    std::fill(columns.sequence_tokens.begin() + first, columns.sequence_tokens.begin() + last,
              static_cast<double>(chosen));
    if (chosen == 0) continue;
    std::fill(columns.first_advantage.begin() + first, columns.first_advantage.begin() + last,
              row.advantages[static_cast<std::size_t>(first_chosen - mask - first)]);
  }
  return columns;
}

PolicyTokens Policy::tokens_of(const Columns& columns, const LocalBatch& batch,
                               const LossRows& rows) const {
  const std::vector<std::int64_t> places = batch.places_of_tokens();
  PolicyTokens tokens;
  tokens.mean_weight = mean_weight_;
  const std::pair<const std::vector<double>*, at::Tensor*> all[] = {
      {&columns.old, &tokens.old},
      {&columns.behaviour, &tokens.behaviour},
      {&columns.reference, &tokens.reference},
      {&columns.age, &tokens.age},
      {&columns.depth, &tokens.depth},
      {&columns.advantages, &tokens.advantages},
      {&columns.sequence_tokens, &tokens.sequence_tokens},
      {&columns.first_advantage, &tokens.first_advantage}};
  // One upload for all.
  at::Tensor table = at::empty({std::ssize(all), std::ssize(rows.tokens)}, at::kDouble);
  auto* value = table.mutable_data_ptr<double>();
  for (const auto& [column, tensor] : all) {
    for (const std::int64_t token : rows.tokens) {
      const auto place = static_cast<std::size_t>(places[static_cast<std::size_t>(token)]);
      *value++ = column->empty() ? 0 : (*column)[place];
    }
  }
  const runtime::Context& context = placed_.context;
  table = device::upload(table.to(sum_dtype(context)), context.device);
  std::int64_t i = 0;
  for (const auto& [column, tensor] : all) {
    if (!column->empty()) *tensor = table.select(0, i);
    ++i;
  }
  return tokens;
}

std::vector<HeadFunction> Policy::heads(std::span<const data::Batch> micro_batches,
                                        const PassOptions& options) {
  std::vector<HeadFunction> functions;
  for (const data::Batch& whole : micro_batches) {
    functions.push_back(
        [this, options, sequences = whole.real_sequences, columns = columns_of(whole)](
            const at::Tensor& hidden, const LocalBatch& batch) {
          return run(hidden, batch, sequences, columns, options);
        });
  }
  return functions;
}

HeadResult Policy::run(const at::Tensor& hidden, const LocalBatch& batch, std::int64_t sequences,
                       const Columns& columns, const PassOptions& options) {
  const runtime::Context& context = placed_.context;
  const c10::ScalarType type = sum_dtype(context);
  const LossRows rows(model(), batch.host, 1);
  const PolicyTokens tokens = tokens_of(columns, batch, rows);
  PolicySums sums;
  at::Tensor entropy, grad_hidden;
  const bool is_by_token = options_.is_by_token();
  // By the entropy of each token's distribution.
  at::Tensor entropy_weights, entropy_gradients;
  if (options_.entropy_coefficient > 0) {
    entropy_weights = mean_factors(tokens, options_) * -options_.entropy_coefficient;
    entropy_gradients = entropy_weights * options.gradient_scale;
  }
  if (is_by_token && columns.supports.empty()) {
    const auto loss = [&](std::int64_t first, const at::Tensor& logprobs) {
      const PolicyLossResult part =
          policy_loss(logprobs.to(type), tokens.narrow(first, logprobs.size(0)), options_, nullptr);
      sums.add(part.sums);
      return part.d_logprobs * options.gradient_scale;
    };
    const TokenLossResult result =
        run_token_loss(model(), hidden, rows, loss, options.wants_gradients, options_.temperature,
                       entropy_gradients);
    entropy = result.entropy;
    grad_hidden = result.grad_hidden;
  } else {
    TokenLogprobs own(model(), hidden, rows,
                      {.want_gradients = options.wants_gradients,
                       .want_entropy = true,
                       .temperature = options_.temperature,
                       .support = support_of(columns.supports, batch, rows, hidden.device()),
                       .entropy_gradients = entropy_gradients});
    const at::Tensor sequence = sequence_of_rows(context, batch, rows);
    const SequenceSums of_sequences(context.mesh.group({comm::Dim::kTp, comm::Dim::kCp}), sequence,
                                    at::ones(sequence.sizes(), sequence.options().dtype(type)),
                                    sequences);
    const PolicyLossResult result =
        policy_loss(own.values().to(type), tokens, options_, is_by_token ? nullptr : &of_sequences);
    sums = result.sums;
    entropy = own.entropy();
    if (options.wants_gradients) {
      grad_hidden =
          own.gradient((result.d_logprobs * options.gradient_scale).to(own.values().scalar_type()));
    }
  }
  at::Tensor loss = at::zeros({}, rows.loss_weights.options());
  if (sums.loss.defined()) {
    if (entropy_weights.defined())
      sums.loss = sums.loss + (entropy.to(type) * entropy_weights).sum();
    loss.copy_(sums.loss);
    sums_.add(sums);
    const at::Tensor entropy_sum = entropy.to(type).sum();
    entropy_ = entropy_.defined() ? entropy_ + entropy_sum : entropy_sum;
  }
  // Ranks along tp and cp have the loss of their rows each.
  model().tensor_group().all_reduce_sum(loss);
  return {loss, grad_hidden, {}};
}

PolicyStatistics Policy::take_statistics() {
  PolicyStatistics statistics;
  const std::vector<double*> found = sums_of(statistics);
  std::vector<double> numbers(found.size()), largest(2);
  const PolicySums own = std::exchange(sums_, {});
  const at::Tensor entropy = std::exchange(entropy_, {});
  if (own.loss.defined()) {
    const at::Tensor host =
        at::cat({own.sums, entropy.unsqueeze(0), own.largest}).to(at::kCPU, at::kDouble);
    const auto* number = host.const_data_ptr<double>();
    numbers.assign(number, number + numbers.size());
    largest.assign(number + numbers.size(), number + host.numel());
  }
  at::Tensor sums = at::from_blob(numbers.data(), {std::ssize(numbers)}, at::kDouble),
             most = at::from_blob(largest.data(), {std::ssize(largest)}, at::kDouble);
  const comm::Group group = placed_.context.mesh.world_group();
  group.all_reduce_sum(sums);
  group.all_reduce_max(most);
  for (std::size_t i = 0; i < numbers.size(); ++i) *found[i] = numbers[i];
  statistics.ratio_max = largest[0];
  statistics.mismatch_abs_max = largest[1];
  return statistics;
}

}  // namespace heddle::objective
