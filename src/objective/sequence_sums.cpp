#include "objective/sequence_sums.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mv.h>

#include <limits>
#include <utility>
#include <vector>

#include "device/upload.h"

namespace heddle::objective {

c10::ScalarType sum_dtype(const runtime::Context& context) {
  return context.device.is_privateuseone() ? context.wide_dtype() : at::kDouble;
}

SequenceSums::SequenceSums(comm::Group group, const at::Tensor& sequence, const at::Tensor& weights,
                           std::int64_t sequences)
    : group_(std::move(group)), sequence_(sequence) {
  const at::Tensor is_in = at::arange(sequences, sequence.options()).unsqueeze(1) == sequence;
  weights_ = is_in * weights;
}

at::Tensor SequenceSums::of(const at::Tensor& values) const {
  at::Tensor sums = at::mv(weights_, values.to(weights_.scalar_type()));
  group_.all_reduce_sum(sums);
  return sums;
}

at::Tensor SequenceSums::gradient(const at::Tensor& d_sums) const {
  return at::mv(weights_.t(), d_sums);
}

at::Tensor SequenceSums::largest(const at::Tensor& values) const {
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  at::Tensor largest = values.numel() == 0
                           ? at::full({weights_.size(0)}, kNothing, weights_.options())
                           : at::amax(values.to(weights_.scalar_type())
                                          .expand_as(weights_)
                                          .masked_fill(weights_ == 0, kNothing),
                                      {1});
  group_.all_reduce_max(largest);
  return largest;
}

at::Tensor SequenceSums::at_tokens(const at::Tensor& of_sequences) const {
  return at::index_select(of_sequences, 0, sequence_);
}

at::Tensor sequence_of_rows(const runtime::Context& context, const LocalBatch& batch,
                            const LossRows& rows) {
  const std::vector<std::int64_t> all = batch.sequences_of_tokens();
  std::vector<std::int64_t> own;
  for (const std::int64_t token : rows.tokens) own.push_back(all[static_cast<std::size_t>(token)]);
  return device::upload(own, context.device);
}

SequenceSums sums_of_rows(const runtime::Context& context, const LocalBatch& batch,
                          const LossRows& rows, std::int64_t sequences) {
  return {context.mesh.group({comm::Dim::kTp, comm::Dim::kCp}),
          sequence_of_rows(context, batch, rows), rows.loss_weights.to(sum_dtype(context)),
          sequences};
}

}  // namespace heddle::objective
