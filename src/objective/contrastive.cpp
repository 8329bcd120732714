#include "objective/contrastive.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "base/errors.h"
#include "device/upload.h"
#include "ops/autograd.h"

namespace heddle::objective {
namespace {

/// Queries and documents (positives and negatives, in their order) of a batch.
struct Roles {
  at::Tensor queries;    ///< [Q] rows of the embeddings
  at::Tensor documents;  ///< [D]
  at::Tensor positives;  ///< [Q] place of each query's positive among the documents
};

Roles roles_of(std::span<const std::int64_t> text_of_row, c10::Device device) {
  std::vector<std::int64_t> queries, documents, positives;
  for (std::size_t s = 0; s < text_of_row.size(); ++s) {
    const auto row = static_cast<std::int64_t>(s);
    if (text_of_row[s] == 0) {
      queries.push_back(row);
      continue;
    }
    if (text_of_row[s] == 1) positives.push_back(static_cast<std::int64_t>(documents.size()));
    documents.push_back(row);
  }
  if (queries.size() != positives.size() || queries.empty()) {
    throw_error<InternalError>("{} queries and {} positives in a batch", queries.size(),
                               positives.size());
  }
  const auto indices = [&](const std::vector<std::int64_t>& list) {
    return device::upload(list, device);
  };
  return {indices(queries), indices(documents), indices(positives)};
}

at::Tensor unit_length(const at::Tensor& rows) {
  return rows / at::linalg_vector_norm(rows, 2, {-1}, /*keepdim=*/true).clamp_min(1e-12);
}

}  // namespace

ContrastiveResult info_nce(const at::Tensor& embeddings, std::span<const std::int64_t> text_of_row,
                           const ContrastiveOptions& options, double gradient_scale,
                           bool want_gradients) {
  const auto wide = embeddings.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Roles roles = roles_of(text_of_row, embeddings.device());
  at::Tensor leaf = ops::detached(embeddings).to(wide);
  const auto forward = [&] {
    const at::Tensor rows = options.normalize ? unit_length(leaf) : leaf;
    const at::Tensor similarity =
        at::mm(rows.index_select(0, roles.queries), rows.index_select(0, roles.documents).t());
    return at::cross_entropy_loss(similarity / options.temperature, roles.positives, {},
                                  at::Reduction::Sum);
  };
  if (!want_gradients) return {ops::run_without_gradient(forward), {}};
  leaf.set_requires_grad(true);
  const at::Tensor loss = forward();
  ops::run_backward({loss}, {ops::run_without_gradient([&] {
                      return at::full({}, gradient_scale, loss.options().requires_grad(false));
                    })});
  return {ops::detached(loss), leaf.grad().to(embeddings.scalar_type())};
}

Retrieval retrieval(const at::Tensor& embeddings, std::span<const std::int64_t> text_of_row,
                    bool normalize) {
  const ops::NoGradient guard;
  const Roles roles = roles_of(text_of_row, embeddings.device());
  const at::Tensor rows = normalize ? unit_length(embeddings) : embeddings;
  const at::Tensor documents = rows.index_select(0, roles.documents);
  constexpr std::int64_t kQueriesAtOnce = 256;  // bounds the table of similarities
  const std::int64_t count = roles.queries.size(0);
  Retrieval result;
  for (std::int64_t begin = 0; begin < count; begin += kQueriesAtOnce) {
    const std::int64_t part = std::min(kQueriesAtOnce, count - begin);
    const at::Tensor similarity =
        at::mm(rows.index_select(0, roles.queries.narrow(0, begin, part)), documents.t());
    const at::Tensor own =
        at::gather(similarity, 1, roles.positives.narrow(0, begin, part).unsqueeze(1));
    const at::Tensor rank = (at::sum(similarity > own, {1}) + 1).cpu().to(at::kDouble);
    result.accuracy_at_1 += at::sum(rank == 1).item<double>();
    result.mrr_at_10 += at::sum((rank <= 10).to(at::kDouble) / rank).item<double>();
  }
  result.accuracy_at_1 /= static_cast<double>(count);
  result.mrr_at_10 /= static_cast<double>(count);
  return result;
}

}  // namespace heddle::objective
