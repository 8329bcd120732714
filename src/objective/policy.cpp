#include "objective/policy.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "device/upload.h"
#include "objective/language_model.h"
#include "ops/autograd.h"

namespace heddle::objective {
namespace {

/// Numbers of a micro-batch's tokens, over tp and cp: [T] log-probabilities, and the sum of
/// the entropies.
struct Known {
  std::vector<double> logprobs;
  double entropy = 0;
};

Known bring_together(const comm::Mesh& mesh, const LocalBatch& batch, const LossRows& rows,
                     const TokenLogprobs& own, std::int64_t tokens) {
  std::vector<double> table(static_cast<std::size_t>(tokens) + 1);
  const std::vector<std::int64_t> places = batch.places_of_tokens();
  const at::Tensor values = own.values().cpu().to(at::kDouble).contiguous();
  const auto* value = values.const_data_ptr<double>();
  for (std::size_t i = 0; i < rows.tokens.size(); ++i)
    table[static_cast<std::size_t>(places[static_cast<std::size_t>(rows.tokens[i])])] = value[i];
  table.back() = own.entropy().sum().item<double>();
  const comm::Group group = mesh.group({comm::Dim::kTp, comm::Dim::kCp});
  if (group.size() > 1) {
    at::Tensor all = at::from_blob(table.data(), {std::ssize(table)}, at::kDouble);
    group.all_reduce_sum(all);
  }
  const double entropy = table.back();
  table.pop_back();
  return {std::move(table), entropy};
}

/// The supports of the labels of `rows` as TokenLogprobs takes them; undefined without any.
at::Tensor support_of(const std::vector<std::vector<std::int32_t>>& supports,
                      const LocalBatch& batch, const LossRows& rows, c10::Device device) {
  if (supports.empty() || rows.tokens.empty()) return {};
  const std::vector<std::int64_t> places = batch.places_of_tokens();
  const auto of_row = [&](std::size_t i) -> const std::vector<std::int32_t>& {
    return supports[static_cast<std::size_t>(places[static_cast<std::size_t>(rows.tokens[i])])];
  };
  std::size_t widest = 1;
  for (std::size_t i = 0; i < rows.tokens.size(); ++i) widest = std::max(widest, of_row(i).size());
  at::Tensor table =
      at::full({std::ssize(rows.tokens), static_cast<std::int64_t>(widest)}, -1, at::kLong);
  auto* entry = table.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < rows.tokens.size(); ++i, entry += widest)
    std::ranges::copy(of_row(i), entry);
  return device::upload(table, device);
}

/// Appends a row's column to that of the batch, from token `first` on.
template <class Entry>
void put(std::vector<Entry>& column, const std::vector<Entry>& row, std::int64_t first,
         std::int64_t tokens) {
  if (row.empty()) return;
  if (column.empty()) column.resize(static_cast<std::size_t>(tokens));
  std::copy(row.begin(), row.end(), column.begin() + first);
}

}  // namespace

double Policy::divisor(const data::Step& step) const {
  return divisor_of(options_.mean, static_cast<double>(step.loss_rows),
                    static_cast<double>(step.sequences));
}

Policy::Columns Policy::columns_of(const data::Batch& whole) const {
  Columns columns;
  columns.advantages.resize(static_cast<std::size_t>(whole.size()));
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
    put(columns.advantages, row.advantages, first, whole.size());
    put(columns.supports, row.supports, first, whole.size());
  }
  return columns;
}

std::vector<HeadFunction> Policy::heads(std::span<const data::Batch> micro_batches,
                                        const PassOptions& options) {
  std::vector<HeadFunction> functions;
  for (const data::Batch& whole : micro_batches) {
    functions.push_back([this, &whole, options, columns = columns_of(whole)](
                            const at::Tensor& hidden, const LocalBatch& batch) {
      return run(hidden, batch, whole, columns, options);
    });
  }
  return functions;
}

HeadResult Policy::run(const at::Tensor& hidden, const LocalBatch& batch, const data::Batch& whole,
                       const Columns& columns, const PassOptions& options) {
  const comm::Mesh& mesh = placed_.context.mesh;
  const LossRows rows(model(), batch.host, 1);
  TokenLogprobs own(model(), hidden, rows, options.wants_gradients, /*want_entropy=*/true,
                    options_.temperature,
                    support_of(columns.supports, batch, rows, hidden.device()));
  const Known known = bring_together(mesh, batch, rows, own, whole.size());

  const auto* mask = whole.loss_weights.const_data_ptr<float>();
  PolicyTokens tokens;
  tokens.cu_seqlens = whole.cu_seqlens_host;
  tokens.logprobs = known.logprobs;
  tokens.old = columns.old;
  tokens.behaviour = columns.behaviour;
  tokens.reference = columns.reference;
  tokens.advantages = columns.advantages;
  tokens.mask = {mask, static_cast<std::size_t>(whole.size())};
  PolicyLossResult loss = policy_loss(tokens, options_);

  // Ranks along tp and cp know the whole loss of a micro-batch: one along cp reports it, and the
  // head's loss is whole on every rank along tp.
  const bool reports = mesh.coordinate(comm::Dim::kCp) == 0;
  loss.statistics.entropy = known.entropy;
  if (reports) statistics_.add(loss.statistics);
  HeadResult result{number(reports ? loss.loss_sum : 0), {}, {}};
  if (!options.wants_gradients) return result;
  const std::vector<std::int64_t> places = batch.places_of_tokens();
  std::vector<double> d_values;
  for (const std::int64_t token : rows.tokens)
    d_values.push_back(
        options.gradient_scale *
        loss.d_logprobs[static_cast<std::size_t>(places[static_cast<std::size_t>(token)])]);
  const at::Tensor d_logprobs = at::tensor(d_values, at::kDouble).to(own.values().scalar_type());
  result.grad_hidden = own.gradient(device::upload(d_logprobs, hidden.device()));
  return result;
}

PolicyStatistics Policy::take_statistics() {
  PolicyStatistics own = std::exchange(statistics_, {});
  const comm::Group group = placed_.context.mesh.loss_group();
  if (group.size() == 1) return own;
  std::vector<double> sums, largest = {own.ratio_max, own.mismatch_abs_max};
  for (const auto sum : kPolicySums) sums.push_back(own.*sum);
  at::Tensor all = at::from_blob(sums.data(), {std::ssize(sums)}, at::kDouble),
             most = at::from_blob(largest.data(), {std::ssize(largest)}, at::kDouble);
  group.all_reduce_sum(all);
  group.all_reduce_max(most);
  for (std::size_t i = 0; i < sums.size(); ++i) own.*kPolicySums[i] = sums[i];
  own.ratio_max = largest[0];
  own.mismatch_abs_max = largest[1];
  return own;
}

}  // namespace heddle::objective
