#include "objective/embedding.h"

#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <map>
#include <utility>

#include <nlohmann/json.hpp>

#include "assembly/model_units.h"
#include "device/upload.h"
#include "objective/last_token.h"
#include "ops/autograd.h"

namespace heddle::objective {
namespace {

/// A text of a batch that ranks share: the place of its micro-batch among all, and its own in that.
using Place = std::pair<std::int64_t, std::int64_t>;

/// Embeddings of the texts whose last token this rank has, of one micro-batch.
struct EmbeddedTexts {
  at::Tensor embeddings;  ///< [n,H]
  std::vector<Place> places;
  std::vector<std::int64_t> text_of_row;  ///< [n], as in Batch
};

/// Embeddings of all micro-batches and ranks, equal on every rank.
struct EmbeddingTable {
  at::Tensor embeddings;                  ///< [S,H], in the order of their places
  std::vector<std::int64_t> text_of_row;  ///< [S]
  std::map<Place, std::int64_t> row_at;

  at::Tensor rows_of(const EmbeddedTexts& texts) const {
    std::vector<std::int64_t> rows;
    for (const Place& place : texts.places) rows.push_back(row_at.at(place));
    return device::upload(rows, embeddings.device());
  }
};

EmbeddingTable gathered(const std::vector<EmbeddedTexts>& parts, std::int64_t width,
                        const at::TensorOptions& options, const comm::Group& group) {
  const ops::NoGradient guard;
  nlohmann::json mine = nlohmann::json::array();
  for (const EmbeddedTexts& part : parts) {
    for (std::size_t i = 0; i < part.places.size(); ++i)
      mine.push_back({part.places[i].first, part.places[i].second, part.text_of_row[i]});
  }
  std::map<Place, std::int64_t> texts;
  for (const std::string& of_rank : group.all_gather_objects(mine.dump())) {
    for (const auto& entry : nlohmann::json::parse(of_rank)) texts[{entry[0], entry[1]}] = entry[2];
  }
  EmbeddingTable table;
  for (const auto& [place, text] : texts) {
    table.row_at[place] = static_cast<std::int64_t>(table.text_of_row.size());
    table.text_of_row.push_back(text);
  }
  // One rank has each row: the sum over the ranks fills the table.
  const auto count = static_cast<std::int64_t>(table.text_of_row.size());
  table.embeddings = at::zeros({count, width}, options);
  for (const EmbeddedTexts& part : parts) {
    if (!part.places.empty())
      table.embeddings.index_copy_(0, table.rows_of(part), part.embeddings.to(options.dtype()));
  }
  group.all_reduce_sum(table.embeddings);
  return table;
}

at::Tensor embeddings_of(Model& model, const at::Tensor& hidden, const data::Batch& batch) {
  return model.final_norm(last_token_rows(model, hidden, batch));
}

/// One micro-batch; `number` is its place among all. `dropout_step`: see LocalBatch.
EmbeddedTexts embedded_texts(const assembly::ModelOnRanks& placed, const data::Batch& host_batch,
                             std::int64_t number, std::uint64_t dropout_step) {
  const ops::NoGradient guard;
  Model& model = *placed.model;
  const LocalBatch batch(model, host_batch, placed.adapters.get(), dropout_step);
  const at::Tensor hidden = evaluate_hidden(model, *placed.pipeline, batch);
  if (!hidden.defined()) return {};
  EmbeddedTexts texts{embeddings_of(model, hidden, batch.host), {}, batch.host.text_of_row};
  for (const std::int64_t sequence : batch.sequences_ending_here())
    texts.places.push_back({number, sequence});
  return texts;
}

}  // namespace

HeadResult train_embedding_head(
    Model& model, const at::Tensor& hidden, const data::Batch& batch,
    const std::function<ContrastiveResult(const at::Tensor& embeddings)>& loss) {
  at::Tensor trunk = ops::detached(hidden);
  trunk.set_requires_grad(true);
  const at::Tensor embeddings = embeddings_of(model, trunk, batch);
  const ContrastiveResult result = loss(ops::detached(embeddings));
  ops::run_backward({embeddings}, {result.gradient});
  return {result.loss_sum, trunk.grad()};
}

double Contrastive::weight(const data::Batch& local) const {
  return static_cast<double>(std::count(local.text_of_row.begin(), local.text_of_row.end(), 0));
}

std::vector<HeadFunction> Contrastive::heads(std::span<const data::Batch> micro_batches,
                                             const PassOptions& pass) {
  const ContrastiveOptions options = options_;
  Model& model = this->model();
  const comm::Mesh& mesh = placed_.context.mesh;
  if (micro_batches.size() == 1 && mesh.loss_group().size() == 1) {
    return {[=, &model](const at::Tensor& hidden, const LocalBatch& batch) {
      return train_embedding_head(model, hidden, batch.host, [&](const at::Tensor& embeddings) {
        return info_nce(embeddings, batch.host.text_of_row, options, pass.gradient_scale,
                        /*want_gradients=*/true);
      });
    }};
  }
  const auto count = static_cast<std::int64_t>(micro_batches.size());
  std::vector<EmbeddedTexts> parts;
  {
    const parallel::Acquired ends = assembly::acquire_ends(placed_.sharding.get(), model);
    for (std::int64_t m = 0; m < count; ++m) {
      parts.push_back(embedded_texts(placed_, micro_batches[static_cast<std::size_t>(m)],
                                     mesh.data_rank() * count + m, pass.dropout_step));
    }
  }
  const auto device = at::TensorOptions().device(placed_.context.device);
  const EmbeddingTable table = gathered(parts, model.config().hidden_size,
                                        device.dtype(placed_.context.dtype), mesh.loss_group());
  const ContrastiveResult whole = info_nce(table.embeddings, table.text_of_row, options,
                                           pass.gradient_scale, /*want_gradients=*/true);
  std::vector<HeadFunction> heads;
  for (const EmbeddedTexts& part : parts) {
    // The loss is that of the step: who has the first text reports it.
    const bool reports = !part.places.empty() && table.row_at.at(part.places[0]) == 0;
    const ContrastiveResult share{reports ? whole.loss_sum : at::zeros_like(whole.loss_sum),
                                  whole.gradient.index_select(0, table.rows_of(part))};
    heads.push_back([=, &model](const at::Tensor& hidden, const LocalBatch& batch) {
      return train_embedding_head(model, hidden, batch.host,
                                  [&](const at::Tensor&) { return share; });
    });
  }
  return heads;
}

Evaluation Contrastive::evaluate(const std::shared_ptr<const data::Dataset>& rows,
                                 const data::EvaluationLoader::Options& loader_options) {
  const comm::Mesh& mesh = placed_.context.mesh;
  data::EvaluationLoader loader(rows, loader_options);
  const parallel::Acquired ends = assembly::acquire_ends(placed_.sharding.get(), model());
  std::vector<EmbeddedTexts> parts;
  for (std::int64_t number = mesh.data_rank(); const auto batch = loader.next();
       number += mesh.data_size())
    parts.push_back(embedded_texts(placed_, *batch, number, /*dropout_step=*/0));
  const runtime::Context& context = placed_.context;
  const auto [embeddings, text_of_row, row_at] = gathered(
      parts, model().config().hidden_size,
      at::TensorOptions().dtype(context.wide_dtype()).device(context.device), mesh.loss_group());
  // The loss in batches of as many queries as training sees, in the order of the file.
  double loss = 0;
  std::int64_t queries = 0, in_batch = 0;
  std::size_t begin = 0;
  const auto flush = [&](std::size_t end) {
    if (end == begin) return;
    const auto texts = embeddings.narrow(0, static_cast<std::int64_t>(begin),
                                         static_cast<std::int64_t>(end - begin));
    loss += info_nce(texts, std::span(text_of_row).subspan(begin, end - begin), options_, 1,
                     /*want_gradients=*/false)
                .loss_sum.item<double>();
    queries += in_batch;
    in_batch = 0;
    begin = end;
  };
  for (std::size_t s = 0; s < text_of_row.size(); ++s) {
    if (text_of_row[s] == 0 && in_batch == queries_at_once_) flush(s);
    in_batch += text_of_row[s] == 0;
  }
  flush(text_of_row.size());
  const Retrieval found = retrieval(embeddings, text_of_row, options_.normalize);
  Evaluation evaluation{loss / static_cast<double>(queries), {}};
  evaluation.metrics.set(metric::kAccuracyAt1, found.accuracy_at_1);
  evaluation.metrics.set(metric::kMrrAt10, found.mrr_at_10);
  return evaluation;
}

}  // namespace heddle::objective
