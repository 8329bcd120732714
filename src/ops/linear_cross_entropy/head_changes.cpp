#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/compute_type.h"
#include "ops/linear/linear.h"
#include "ops/linear_cross_entropy/kernels.h"

namespace heddle::ops {
namespace {

/// Rows that a change and a chunk have in common, counted in each.
struct Common {
  std::int64_t in_change, in_chunk, count;
};

Common common_of(const LinearCrossEntropy::Change& change, std::int64_t begin, std::int64_t rows) {
  const std::int64_t first = std::max(change.first, begin),
                     last = std::min(change.first + change.low.size(0), begin + rows);
  return {first - change.first, first - begin, std::max<std::int64_t>(0, last - first)};
}

}  // namespace

HeadChanges::HeadChanges(const LinearCrossEntropy::Inputs& inputs, bool want_gradients)
    : changes_(inputs.changes) {
  if (!want_gradients) return;
  for (const LinearCrossEntropy::Change& change : changes_) {
    gradients_.push_back({at::empty(change.low.sizes(), change.low.options()),
                          at::zeros(change.weight.sizes(),
                                    change.weight.options().dtype(compute_type(change.weight)))});
  }
}

void HeadChanges::add_to(at::Tensor& logits, std::int64_t begin) const {
  for (const LinearCrossEntropy::Change& change : changes_) {
    const Common rows = common_of(change, begin, logits.size(0));
    if (rows.count == 0) continue;
    at::Tensor part = logits.narrow(0, rows.in_chunk, rows.count);
    const auto type = part.scalar_type();
    part.addmm_(change.low.narrow(0, rows.in_change, rows.count).to(type),
                change.weight.to(type).t());
  }
}

void HeadChanges::take(const at::Tensor& d_logits, std::int64_t begin, const at::Tensor& factors) {
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const LinearCrossEntropy::Change& change = changes_[i];
    const Common rows = common_of(change, begin, d_logits.size(0));
    if (rows.count == 0) continue;
    const at::Tensor d = d_logits.narrow(0, rows.in_chunk, rows.count);
    const auto type = d.scalar_type();
    at::Tensor low = change.low.narrow(0, rows.in_change, rows.count).to(type),
               d_low = at::mm(d, change.weight.to(type));
    if (factors.defined()) {
      const at::Tensor own = factors.narrow(0, rows.in_chunk, rows.count);
      d_low = d_low * own;
      low = (low * own).to(type);
    }
    gradients_[i].low.narrow(0, rows.in_change, rows.count).copy_(d_low);
    gradients_[i].weight.add_(wide_product(d, low));
  }
}

}  // namespace heddle::ops
