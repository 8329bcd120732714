#include "objective/value.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include "assembly/model_units.h"
#include "base/errors.h"
#include "device/upload.h"
#include "objective/last_token.h"
#include "objective/sequence_sums.h"
#include "objective/value_loss.h"
#include "ops/autograd.h"

namespace heddle::objective {
namespace {

/// Tokens of this rank's part of a batch that have a value, the same on all ranks along tp.
std::vector<std::int64_t> valued_tokens(const data::Batch& batch) {
  std::vector<std::int64_t> tokens;
  const auto* label = batch.labels.const_data_ptr<std::int64_t>();
  const auto* weight = batch.loss_weights.const_data_ptr<float>();
  for (std::int64_t t = 0; t < batch.labels.numel(); ++t) {
    if (label[t] != data::kIgnoredLabel && weight[t] != 0) tokens.push_back(t);
  }
  return tokens;
}

/// Values [n] of these tokens, differentiable.
at::Tensor value_head(Model& model, const at::Tensor& hidden, const data::Batch& batch,
                      const std::vector<std::int64_t>& tokens) {
  return model.score()
      .forward(model.kernels(), model.final_norm(rows_of_tokens(model, hidden, batch, tokens)))
      .squeeze(1)
      .to(model.context().wide_dtype());
}

}  // namespace

double Value::divisor(const data::Step& step) const { return static_cast<double>(step.loss_rows); }

Value::Columns Value::columns_of(const data::Batch& whole) const {
  Columns columns;
  columns.old.resize(static_cast<std::size_t>(whole.size()));
  columns.returns.resize(static_cast<std::size_t>(whole.size()));
  for (std::int64_t s = 0; s < whole.real_sequences; ++s) {
    const auto i = static_cast<std::size_t>(s);
    const std::int64_t first = whole.cu_seqlens_host[i],
                       tokens = whole.cu_seqlens_host[i + 1] - first;
    const ValueRow& row = rows_.at(static_cast<std::size_t>(whole.row_ids[i]));
    if (std::ssize(row.old) != tokens || std::ssize(row.returns) != tokens) {
      throw_error<InternalError>("row {} has {} values and {} returns, its sequence {} tokens",
                                 whole.row_ids[i], row.old.size(), row.returns.size(), tokens);
    }
    std::ranges::copy(row.old, columns.old.begin() + first);
    std::ranges::copy(row.returns, columns.returns.begin() + first);
  }
  return columns;
}

std::vector<HeadFunction> Value::heads(std::span<const data::Batch> micro_batches,
                                       const PassOptions& options) {
  std::vector<HeadFunction> functions;
  for (const data::Batch& whole : micro_batches) {
    functions.push_back([this, options, columns = columns_of(whole)](const at::Tensor& hidden,
                                                                     const LocalBatch& batch) {
      return run(hidden, batch, columns, options);
    });
  }
  return functions;
}

HeadResult Value::run(const at::Tensor& hidden, const LocalBatch& batch, const Columns& columns,
                      const PassOptions& options) const {
  const std::vector<std::int64_t> tokens = valued_tokens(batch.host),
                                  places = batch.places_of_tokens();
  const c10::ScalarType type = sum_dtype(placed_.context);
  at::Tensor trunk = ops::detached(hidden);
  if (options.wants_gradients) trunk.set_requires_grad(true);
  if (tokens.empty()) {
    const at::Tensor nothing = at::zeros({}, hidden.options().dtype(type).requires_grad(false));
    return {nothing, options.wants_gradients ? at::zeros_like(hidden) : at::Tensor(), {nothing}};
  }
  const auto forward = [&] { return value_head(model(), trunk, batch.host, tokens); };
  const at::Tensor values =
      options.wants_gradients ? forward() : ops::run_without_gradient(forward);

  const ops::NoGradient guard;
  at::Tensor table = at::empty({2, std::ssize(tokens)}, at::kDouble);
  auto* number = table.mutable_data_ptr<double>();
  for (const std::vector<double>* column : {&columns.old, &columns.returns}) {
    for (const std::int64_t token : tokens) {
      *number++ = (*column)[static_cast<std::size_t>(places[static_cast<std::size_t>(token)])];
    }
  }
  table = device::upload(table.to(type), hidden.device());
  const ValueLossResult loss =
      value_loss(ops::detached(values).to(type), table[0], table[1], clip_);
  HeadResult result{loss.loss.sum(), {}, {loss.clipped.to(type).sum()}};
  if (!options.wants_gradients) return result;
  ops::run_backward({values}, {(options.gradient_scale * loss.d_values).to(values.scalar_type())});
  result.grad_hidden = trunk.grad();
  return result;
}

at::Tensor Value::values(const data::Batch& whole) const {
  const ops::NoGradient guard;
  Model& model = this->model();
  const parallel::Acquired ends = assembly::acquire_ends(placed_.sharding.get(), model);
  const LocalBatch batch(model, whole, placed_.adapters.get());
  const at::Tensor hidden = evaluate_hidden(model, *placed_.pipeline, batch);
  at::Tensor values = at::zeros({whole.size()}, at::kDouble);
  if (!hidden.defined()) return values;
  const std::vector<std::int64_t> tokens = valued_tokens(batch.host),
                                  places = batch.places_of_tokens();
  if (tokens.empty()) return values;
  const at::Tensor found =
      value_head(model, hidden, batch.host, tokens).cpu().to(at::kDouble).contiguous();
  // The ranks along tp have the same ones.
  if (model.tensor_group().rank() > 0) return values;
  auto* const all = values.mutable_data_ptr<double>();
  const auto* const told = found.const_data_ptr<double>();
  for (std::size_t i = 0; i < tokens.size(); ++i)
    all[places[static_cast<std::size_t>(tokens[i])]] = told[i];
  return values;
}

}  // namespace heddle::objective
