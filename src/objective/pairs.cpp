#include "objective/pairs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mv.h>

#include <algorithm>

#include "base/errors.h"
#include "device/upload.h"

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

c10::ScalarType sum_dtype(const runtime::Context& context) {
  return context.device.is_privateuseone() ? context.wide_dtype() : at::kDouble;
}

SequenceSums::SequenceSums(const runtime::Context& context, const LocalBatch& batch,
                           const LossRows& rows, std::int64_t sequences)
    : group_(context.mesh.group({comm::Dim::kTp, comm::Dim::kCp})) {
  const c10::ScalarType type = sum_dtype(context);
  const std::vector<std::int64_t> sequence_of = batch.sequences_of_tokens();
  std::vector<std::int64_t> sequence;
  for (const std::int64_t token : rows.tokens)
    sequence.push_back(sequence_of[static_cast<std::size_t>(token)]);
  const at::Tensor own = device::upload(sequence, context.device);
  const at::Tensor is_in = at::arange(sequences, own.options()).unsqueeze(1) == own;
  weights_ = is_in * rows.loss_weights.to(type);
}

at::Tensor SequenceSums::of(const at::Tensor& values) const {
  at::Tensor sums = at::mv(weights_, values.to(weights_.scalar_type()));
  group_.all_reduce_sum(sums);
  return sums;
}

at::Tensor SequenceSums::gradient(const at::Tensor& d_sums) const {
  return at::mv(weights_.t(), d_sums);
}

void sum_over_ranks(const comm::Mesh& mesh, const std::vector<comm::Dim>& dims,
                    std::vector<double>& of_sequences) {
  const comm::Group group = mesh.group(dims);
  if (group.size() == 1 || of_sequences.empty()) return;
  at::Tensor table = at::from_blob(of_sequences.data(), {std::ssize(of_sequences)}, at::kDouble);
  group.all_reduce_sum(table);
}

}  // namespace heddle::objective
