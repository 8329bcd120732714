#include "train/scorer.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "assembly/model_units.h"
#include "base/errors.h"
#include "data/batch.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "train/router_replay.h"

namespace heddle::train {
namespace {

using objective::Model;

using Rows = std::span<const std::vector<std::int32_t>>;

void check_rows(Rows rows, std::int64_t vocabulary) {
  for (const std::vector<std::int32_t>& row : rows) {
    if (row.empty()) throw DataError("a row without tokens cannot be scored");
    for (const std::int32_t id : row) {
      if (id < 0 || id >= vocabulary) {
        throw_error<DataError>("token id {} is outside the model's vocabulary of {}", id,
                               vocabulary);
      }
    }
  }
}

data::Batch batch_of(Rows rows) {
  std::vector<std::vector<std::int32_t>> labels(rows.size());
  std::vector<std::vector<float>> weights(rows.size());
  std::vector<data::SequenceView> views;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    labels[r].assign(rows[r].begin() + 1, rows[r].end());
    labels[r].push_back(static_cast<std::int32_t>(data::kIgnoredLabel));
    weights[r].assign(rows[r].size(), 1.0F);
    weights[r].back() = 0;
    views.push_back({rows[r], labels[r], weights[r], static_cast<std::int64_t>(r), 0});
  }
  return data::Batch::from_sequences(views);
}

/// A rank's knowledge of scores that lie one after the other: entry `to` of all is its `value`.
struct Entry {
  std::int64_t to;
  double value;
};

/// Entries for numbers [T/tp] of the tokens at these places of its rows; the first row's begin at
/// `begin`.
std::vector<Entry> entries_of_tokens(std::span<const std::int64_t> places,
                                     const at::Tensor& numbers, std::int64_t begin,
                                     std::int64_t tokens) {
  if (!numbers.defined()) return {};
  const at::Tensor values = numbers.cpu().to(at::kDouble).contiguous();
  const double* const value = values.const_data_ptr<double>();
  std::vector<Entry> entries;
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    const std::int64_t place = places[static_cast<std::size_t>(i)];
    if (place < tokens) entries.push_back({begin + place, value[i]});
  }
  return entries;
}

/// Entries for the outputs [S,n] of the sequences that end here; those are equal along tp.
std::vector<Entry> entries_of_rows(const Model& model, const data::Batch& batch,
                                   const at::Tensor& outputs, std::int64_t first_row) {
  std::vector<Entry> entries;
  if (!outputs.defined() || model.tensor_group().rank() > 0) return entries;
  const at::Tensor values = outputs.cpu().to(at::kDouble).contiguous();
  const std::int64_t width = values.size(1);
  const double* value = values.const_data_ptr<double>();
  for (const std::int64_t row : batch.row_ids) {
    for (std::int64_t j = 0; j < width; ++j)
      entries.push_back({(first_row + row) * width + j, *value++});
  }
  return entries;
}

}  // namespace

std::size_t Scorer::first_row(std::size_t count, std::int64_t rank) const {
  return count * static_cast<std::size_t>(rank) /
         static_cast<std::size_t>(placed_.context.mesh.data_size());
}

ScoreResult Scorer::score_locally(const LocalBatch& local, const ScoreRequest& request,
                                  const objective::Supports& supports,
                                  std::vector<at::Tensor>* experts) {
  Model& model = *placed_.model;
  const parallel::Acquired ends = assembly::acquire_ends(placed_.sharding.get(), model);
  std::vector<at::Tensor> given;
  if (local.host.experts.defined()) {
    const ops::Rows own = ops::own_rows(local.host.size(), model.tensor_group());
    given = experts_of_batch(local.host, own, ops::real_rows(own, local.host.real_tokens),
                             model.config(), /*first_layer=*/0,
                             model.config().sparse_layers().size(), model.context().device);
    if (experts == nullptr) experts = &given;
    *experts = given;
  }
  const at::Tensor hidden = objective::evaluate_hidden(model, *placed_.pipeline, local, experts);
  if (!hidden.defined()) return {};
  at::Tensor support;
  if (!supports.empty()) {
    // Tokens that fill a batch up have none.
    std::vector<std::int64_t> places = places_;
    for (std::int64_t& place : places) place = std::min(place, std::ssize(supports) - 1);
    support = objective::support_table(supports, places, hidden.device());
  }
  return objective::score_head(model, hidden, local.device, request, support);
}

std::vector<RowScore> Scorer::score(Rows rows, const ScoreRequest& request,
                                    std::vector<at::Tensor>* experts,
                                    std::span<const at::Tensor> given,
                                    std::span<const objective::Supports> supports) {
  const ops::NoGradient guard;
  const Model& model = *placed_.model;
  check_rows(rows, model.config().vocab_size);
  const bool is_language_model = model.head() == models::Head::kLanguageModel;
  const std::int64_t width =
      model.head() == models::Head::kClassify ? model.num_labels() : model.config().hidden_size;
  // By row its first entry, and after the last row their number.
  std::vector<std::int64_t> begin = {0};
  for (const std::vector<std::int32_t>& row : rows)
    begin.push_back(begin.back() +
                    (is_language_model ? static_cast<std::int64_t>(row.size()) : width));

  const comm::Mesh& mesh = model.context().mesh;
  const auto first = static_cast<std::int64_t>(first_row(rows.size(), mesh.data_rank())),
             last = static_cast<std::int64_t>(first_row(rows.size(), mesh.data_rank() + 1));
  data::Batch batch = batch_of(rows.subspan(first, last - first));
  if (!given.empty() && first < last) {
    const auto own =
        given.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first));
    batch.experts = at::cat(std::vector<at::Tensor>(own.begin(), own.end())).t().contiguous();
  }
  const LocalBatch local(model, batch, with_adapters_ ? placed_.adapters.get() : nullptr);
  objective::Supports of_tokens_here;
  if (!supports.empty()) {
    for (std::int64_t row = first; row < last; ++row) {
      const objective::Supports& own = supports[static_cast<std::size_t>(row)];
      of_tokens_here.insert(of_tokens_here.end(), own.begin(), own.end());
    }
    of_tokens_here.emplace_back();
  }
  const std::vector<std::int64_t> all_places = local.places_of_tokens();
  const ops::Rows share = ops::own_rows(std::ssize(all_places), model.tensor_group());
  places_.assign(all_places.begin() + share.first, all_places.begin() + share.first + share.count);
  const ScoreResult scored = score_locally(local, request, of_tokens_here, experts);
  const bool with_entropies = is_language_model && request.entropy;
  // Each entry is known to one rank: the sum fills the others in.
  at::Tensor table = at::zeros({with_entropies ? 2 : 1, begin.back()}, at::kDouble);
  double* const all = table.mutable_data_ptr<double>();
  double* const entropies = all + begin.back();
  const auto of_tokens = [&](const at::Tensor& numbers) {
    return entries_of_tokens(places_, numbers, begin[first], begin[last] - begin[first]);
  };
  for (const Entry& entry : is_language_model
                                ? of_tokens(scored.logprobs)
                                : entries_of_rows(model, local.host, scored.outputs, first))
    all[entry.to] = entry.value;
  if (with_entropies) {
    for (const Entry& entry : of_tokens(scored.entropy)) entropies[entry.to] = entry.value;
  }
  mesh.world_group().all_reduce_sum(table);

  std::vector<RowScore> result(rows.size());
  // Numbers known at a token about the next one.
  const auto of_next = [&](const double* numbers, std::size_t r) {
    std::vector<double> values = {std::numeric_limits<double>::quiet_NaN()};
    values.insert(values.end(), numbers + begin[r], numbers + begin[r + 1] - 1);
    return values;
  };
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (is_language_model) {
      result[r].logprobs = of_next(all, r);
      if (with_entropies) result[r].entropies = of_next(entropies, r);
    } else {
      result[r].outputs.assign(all + begin[r], all + begin[r + 1]);
    }
  }
  return result;
}

}  // namespace heddle::train
