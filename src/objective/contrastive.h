#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::objective {

struct ContrastiveOptions {
  double temperature = 0.05;
  bool normalize = true;  ///< Cosine similarity; else the plain product.
};

struct ContrastiveResult {
  at::Tensor loss_sum;  ///< 0-d, fp32 (fp64): sum over the queries, not divided.
  at::Tensor gradient;  ///< [S,H] of gradient_scale x loss_sum; undefined without gradients.
};

/// InfoNCE with in-batch negatives: the cross-entropy of each query's own positive among all
/// positives and negatives of the batch, logits = similarity / temperature. embeddings [S,H], one
/// row a text; text_of_row [S] says which: 0 a query, 1 its positive, from 2 its negatives, groups
/// one after the other. "Representation Learning with Contrastive Predictive Coding" (arXiv
/// 1807.03748), eq. 4; MultipleNegativesRankingLoss of sentence-transformers, whose scale is 1 /
/// temperature.
ContrastiveResult info_nce(const at::Tensor& embeddings, std::span<const std::int64_t> text_of_row,
                           const ContrastiveOptions& options, double gradient_scale,
                           bool want_gradients);

/// How well queries find their positives among all texts that are no query.
struct Retrieval {
  double accuracy_at_1 = 0;  ///< Share of queries whose own positive is the nearest text.
  double mrr_at_10 = 0;      ///< Mean of 1 / rank of the own positive, 0 from rank 11 on.
};
Retrieval retrieval(const at::Tensor& embeddings, std::span<const std::int64_t> text_of_row,
                    bool normalize);

}  // namespace heddle::objective
