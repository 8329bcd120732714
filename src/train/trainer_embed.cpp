// Training and evaluation of embeddings. In-batch negatives come from the whole global batch, so
// the loss spans micro-batches and ranks: their embeddings are computed first without keeping
// anything and brought together on every rank, the loss gives a gradient to each, and then every
// micro-batch runs once more, forward and backward, from its share of that gradient. "Scaling Deep
// Contrastive Learning Batch Size under Memory Limited Setup" (GradCache, arXiv 2101.06983). The
// size of micro-batches and the layout therefore change nothing.
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <map>
#include <numeric>
#include <utility>

#include <nlohmann/json.hpp>

#include "assembly/model_units.h"
#include "data/context_share.h"
#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/context_parallel/context_parallel.h"
#include "train/contrastive.h"
#include "train/trainer.h"

namespace heddle::train {
namespace {

ContrastiveOptions options_of(const config::RunConfig& config) {
  return {config.train.infonce_temperature, config.model.normalize};
}

/// A text of a batch that ranks share: the place of its micro-batch among all, and its own in that.
using Place = std::pair<std::int64_t, std::int64_t>;

/// Embeddings of the texts whose last token this rank has, of one micro-batch.
struct EmbeddedTexts {
  at::Tensor embeddings;  ///< [n,H]
  std::vector<Place> places;
  std::vector<std::int64_t> text_of_row;  ///< [n], as in Batch
};

/// Those of all micro-batches and ranks, the same on every rank.
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

/// One micro-batch; `number` is its place among all. `dropout_step`: see LocalBatch.
EmbeddedTexts embedded_texts(const assembly::ModelOnRanks& setup, parallel::Pipeline& pipeline,
                             const data::Batch& host_batch, std::int64_t number,
                             std::uint64_t dropout_step) {
  const ops::NoGradient guard;
  Model& model = *setup.model;
  const LocalBatch batch(model, host_batch, setup.adapters.get(), dropout_step);
  const at::Tensor hidden = evaluate_hidden(model, pipeline, batch);
  if (!hidden.defined()) return {};
  EmbeddedTexts texts{embed_head(model, hidden, batch.host), {}, batch.host.text_of_row};
  std::vector<std::int64_t> sequences(texts.text_of_row.size());
  std::iota(sequences.begin(), sequences.end(), 0);
  if (batch.context) sequences = data::sequences_ending_here(host_batch, batch.context->plan);
  for (const std::int64_t sequence : sequences) texts.places.push_back({number, sequence});
  return texts;
}

}  // namespace

std::vector<HeadFunction> Trainer::embed_heads_of(const data::Step& step, double gradient_scale) {
  const ContrastiveOptions options = options_of(config_);
  Model& model = *setup_.model;
  const comm::Group group = setup_.context.mesh.loss_group();
  if (step.micro_batches.size() == 1 && group.size() == 1) {
    return {[=, &model](const at::Tensor& hidden, const data::Batch& batch) {
      return train_embed_head(model, hidden, batch, [&](const at::Tensor& embeddings) {
        return info_nce(embeddings, batch.text_of_row, options, gradient_scale,
                        /*want_gradients=*/true);
      });
    }};
  }
  const auto count = static_cast<std::int64_t>(step.micro_batches.size());
  std::vector<EmbeddedTexts> parts;
  {
    const parallel::Acquired ends = assembly::acquire_ends(setup_.sharding.get(), model);
    for (std::int64_t m = 0; m < count; ++m) {
      const auto i = static_cast<std::size_t>(m);
      parts.push_back(embedded_texts(setup_, pipeline_, step.micro_batches[i],
                                     setup_.context.mesh.data_rank() * count + m,
                                     dropout_step(step)));
    }
  }
  const auto placed = at::TensorOptions().device(setup_.context.device);
  const EmbeddingTable table =
      gathered(parts, model.config().hidden_size, placed.dtype(setup_.context.dtype), group);
  const ContrastiveResult whole = info_nce(table.embeddings, table.text_of_row, options,
                                           gradient_scale, /*want_gradients=*/true);
  std::vector<HeadFunction> heads;
  for (const EmbeddedTexts& part : parts) {
    // The loss is that of the step: who has the first text reports it.
    const bool reports = !part.places.empty() && table.row_at.at(part.places[0]) == 0;
    const ContrastiveResult share{reports ? whole.loss_sum : at::zeros_like(whole.loss_sum),
                                  whole.gradient.index_select(0, table.rows_of(part))};
    heads.push_back([=, &model](const at::Tensor& hidden, const data::Batch& batch) {
      return train_embed_head(model, hidden, batch, [&](const at::Tensor&) { return share; });
    });
  }
  return heads;
}

Evaluation Trainer::evaluate_embeddings() {
  data::EvaluationLoader::Options loader_options;
  const comm::Mesh& mesh = setup_.context.mesh;
  loader_options.micro_batch_tokens = config_.train.micro_batch_tokens;
  loader_options.rank = static_cast<int>(mesh.data_rank());
  loader_options.world = static_cast<int>(mesh.data_size());
  data::EvaluationLoader loader(setup_.eval, loader_options);
  const parallel::Acquired ends = assembly::acquire_ends(setup_.sharding.get(), *setup_.model);
  std::vector<EmbeddedTexts> parts;
  for (std::int64_t number = mesh.data_rank(); const auto batch = loader.next();
       number += mesh.data_size())
    parts.push_back(embedded_texts(setup_, pipeline_, *batch, number, /*dropout_step=*/0));
  const auto [embeddings, text_of_row, row_at] =
      gathered(parts, setup_.model->config().hidden_size,
               at::TensorOptions().dtype(setup_.context.wide_dtype()).device(setup_.context.device),
               mesh.loss_group());
  // The loss in batches of as many queries as training sees, in the order of the file.
  const ContrastiveOptions options = options_of(config_);
  double loss = 0;
  std::int64_t queries = 0, in_batch = 0;
  std::size_t begin = 0;
  const auto flush = [&](std::size_t end) {
    if (end == begin) return;
    const auto rows = embeddings.narrow(0, static_cast<std::int64_t>(begin),
                                        static_cast<std::int64_t>(end - begin));
    loss += info_nce(rows, std::span(text_of_row).subspan(begin, end - begin), options, 1,
                     /*want_gradients=*/false)
                .loss_sum.item<double>();
    queries += in_batch;
    in_batch = 0;
    begin = end;
  };
  for (std::size_t s = 0; s < text_of_row.size(); ++s) {
    if (text_of_row[s] == 0 && in_batch == config_.train.global_batch_size) flush(s);
    in_batch += text_of_row[s] == 0;
  }
  flush(text_of_row.size());
  const Retrieval found = retrieval(embeddings, text_of_row, config_.model.normalize);
  return {loss / static_cast<double>(queries),
          {{"accuracy_at_1", found.accuracy_at_1}, {"mrr_at_10", found.mrr_at_10}}};
}

}  // namespace heddle::train
