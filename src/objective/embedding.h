#pragma once

#include "objective/contrastive.h"
#include "objective/objective.h"

namespace heddle::objective {

/// InfoNCE over the embeddings of a step's texts. In-batch negatives come from the whole global
/// batch, so the loss spans micro-batches and ranks: their embeddings are computed first without
/// keeping anything and brought together on every rank, the loss gives a gradient to each, and then
/// every micro-batch runs once more, forward and backward, from its share of that gradient.
/// "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache, arXiv
/// 2101.06983). The size of micro-batches and the layout therefore change nothing. Divided by the
/// queries.
class Contrastive : public Objective {
 public:
  /// `queries_at_once`: of a batch in evaluation, as many as training sees.
  Contrastive(const assembly::ModelOnRanks& placed, const ContrastiveOptions& options,
              std::int64_t queries_at_once)
      : Objective(placed), options_(options), queries_at_once_(queries_at_once) {}

  double weight(const data::Batch& local) const override;
  std::vector<HeadFunction> heads(std::span<const data::Batch> micro_batches,
                                  const PassOptions& options) override;
  /// Beside the loss accuracy_at_1 and mrr_at_10 over all texts.
  Evaluation evaluate(const std::shared_ptr<const data::Dataset>& rows,
                      const data::EvaluationLoader::Options& loader_options) override;

 private:
  ContrastiveOptions options_;
  std::int64_t queries_at_once_;
};

/// Forward and backward of an embedding head: `loss` turns the embeddings [S,H] of the batch into a
/// sum and its gradient, which goes on to the hidden states and the norm.
HeadResult train_embedding_head(
    Model& model, const at::Tensor& hidden, const data::Batch& batch,
    const std::function<ContrastiveResult(const at::Tensor& embeddings)>& loss);

}  // namespace heddle::objective
