// Training and evaluation of embeddings. In-batch negatives come from the whole global batch, so
// the loss spans micro-batches: their embeddings are computed first without keeping anything, the
// loss gives a gradient to each, and then every micro-batch runs once more, forward and backward,
// from its share of that gradient. "Scaling Deep Contrastive Learning Batch Size under Memory
// Limited Setup" (GradCache, arXiv 2101.06983). The size of micro-batches therefore changes
// nothing.
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include "ops/autograd.h"
#include "train/contrastive.h"
#include "train/trainer.h"

namespace heddle::train {
namespace {

ContrastiveOptions options_of(const config::RunConfig& config) {
  return {config.train.infonce_temperature, config.model.normalize};
}

}  // namespace

at::Tensor Trainer::embeddings_of(const data::Batch& host_batch, std::uint64_t dropout_stream) {
  const ops::NoGradient guard;
  Model& model = *setup_.model;
  if (setup_.adapters) setup_.adapters->set_dropout_stream(dropout_stream);
  const LocalBatch batch(model, host_batch);
  return embed_head(model, evaluate_hidden(model, pipeline_, batch), batch.host);
}

std::vector<HeadFunction> Trainer::embed_heads_of(const data::Step& step, double gradient_scale) {
  const ContrastiveOptions options = options_of(config_);
  if (step.micro_batches.size() == 1) {
    return {[=, this](const at::Tensor& hidden, const data::Batch& batch) {
      return train_embed_head(*setup_.model, hidden, batch, [&](const at::Tensor& embeddings) {
        return info_nce(embeddings, batch.text_of_row, options, gradient_scale,
                        /*want_gradients=*/true);
      });
    }};
  }
  std::vector<at::Tensor> parts;
  std::vector<std::int64_t> text_of_row;
  for (std::size_t i = 0; i < step.micro_batches.size(); ++i) {
    const data::Batch& batch = step.micro_batches[i];
    parts.push_back(embeddings_of(batch, dropout_stream(step, i)));
    text_of_row.insert(text_of_row.end(), batch.text_of_row.begin(), batch.text_of_row.end());
  }
  const ContrastiveResult whole = info_nce(at::cat(parts), text_of_row, options, gradient_scale,
                                           /*want_gradients=*/true);
  std::vector<HeadFunction> heads;
  std::int64_t begin = 0;
  for (const at::Tensor& part : parts) {
    const std::int64_t count = part.size(0);
    // The loss is that of the step: the first micro-batch reports it.
    const ContrastiveResult share{begin == 0 ? whole.loss_sum : at::zeros_like(whole.loss_sum),
                                  whole.gradient.narrow(0, begin, count)};
    heads.push_back([=, this](const at::Tensor& hidden, const data::Batch& batch) {
      return train_embed_head(*setup_.model, hidden, batch,
                              [&](const at::Tensor&) { return share; });
    });
    begin += count;
  }
  return heads;
}

Evaluation Trainer::evaluate_embeddings() {
  data::EvaluationLoader::Options loader_options;
  loader_options.micro_batch_tokens = config_.train.micro_batch_tokens;
  data::EvaluationLoader loader(setup_.eval, loader_options);
  std::vector<at::Tensor> parts;
  std::vector<std::int64_t> text_of_row;
  while (const auto batch = loader.next()) {
    parts.push_back(embeddings_of(*batch, 0).to(setup_.context.wide_dtype()));
    text_of_row.insert(text_of_row.end(), batch->text_of_row.begin(), batch->text_of_row.end());
  }
  const at::Tensor embeddings = at::cat(parts);
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
