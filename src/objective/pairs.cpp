#include "objective/pairs.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "base/errors.h"

namespace heddle::objective {

double PairObjective::weight(const data::Batch& local) const {
  return static_cast<double>(std::count(local.text_of_row.begin(), local.text_of_row.end(), 0));
}

bool PairObjective::reports() const { return placed_.context.mesh.coordinate(comm::Dim::kCp) == 0; }

std::size_t count_pairs(const data::Batch& whole) {
  for (std::size_t s = 0; s < whole.text_of_row.size(); ++s) {
    if (whole.text_of_row[s] != static_cast<std::int64_t>(s % 2))
      throw_error<InternalError>("sequence {} of a batch of pairs is text {} of its row", s,
                                 whole.text_of_row[s]);
  }
  return whole.text_of_row.size() / 2;
}

std::vector<double> sequence_sums(const LocalBatch& batch, const LossRows& rows,
                                  const at::Tensor& values, std::size_t sequences) {
  std::vector<double> sums(sequences);
  const std::vector<std::int64_t> sequence = batch.sequences_of_tokens();
  const at::Tensor host = values.cpu().to(at::kDouble);
  const auto* value = host.const_data_ptr<double>();
  const auto* weight = batch.host.loss_weights.const_data_ptr<float>();
  for (std::size_t i = 0; i < rows.tokens.size(); ++i) {
    const auto token = static_cast<std::size_t>(rows.tokens[i]);
    sums[static_cast<std::size_t>(sequence[token])] += weight[token] * value[i];
  }
  return sums;
}

void sum_over_ranks(const comm::Mesh& mesh, const std::vector<comm::Dim>& dims,
                    std::vector<double>& of_sequences) {
  const comm::Group group = mesh.group(dims);
  if (group.size() == 1 || of_sequences.empty()) return;
  at::Tensor table = at::from_blob(of_sequences.data(), {std::ssize(of_sequences)}, at::kDouble);
  group.all_reduce_sum(table);
}

}  // namespace heddle::objective
