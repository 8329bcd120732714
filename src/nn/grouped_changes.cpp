#include "nn/grouped_changes.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <unordered_set>

#include "ops/compute_type.h"
#include "ops/grouped_low_rank/in_products.h"

namespace heddle::nn {
namespace {

/// Elements of a place, rounded up to where the next one may begin: 64 of fp32 are 256 bytes.
std::int64_t room_of(const Parameter& factor) { return (factor.value().numel() + 63) / 64 * 64; }

/// A contiguous part of an allocation. By hand: hundreds of allocations or views a layer take the
/// host longer than their products the device.
at::Tensor part_of(const at::Tensor& all, std::int64_t first, at::IntArrayRef sizes) {
  at::Tensor part = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(all.storage()),
                                                             all.key_set(), all.dtype());
  part.unsafeGetTensorImpl()->set_storage_offset(first);
  part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return part;
}

/// Where the gradient of this step is summed, if a product in `wide` can add to it; else undefined.
at::Tensor sum_of(const Parameter& factor, c10::ScalarType wide) {
  const at::Tensor& gradient = factor.gradient();
  const bool takes_it = gradient.defined() && factor.gradient_dtype() == wide &&
                        gradient.scalar_type() == wide && gradient.is_contiguous();
  return takes_it ? gradient : at::Tensor();
}

/// Runs `product` with a place for the gradient of each factor: where the gradient of this step is
/// summed, else one of its own that is added. Own places of a call share an allocation, which goes
/// when the last of their sets has made its step.
template <class F>
void accumulate(const std::vector<Parameter*>& factors, const F& product) {
  const c10::ScalarType wide = ops::compute_type(factors.at(0)->value());
  std::vector<ops::FactorSum> sums(factors.size());
  std::unordered_set<const Parameter*> taken;
  std::int64_t room = 0;
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const Parameter& factor = *factors[i];
    if (!factor.trainable()) continue;
    // Two segments of one set do not write to one place at a time.
    if (taken.insert(&factor).second) sums[i].sum = sum_of(factor, wide);
    sums[i].adds = sums[i].sum.defined();
    if (!sums[i].adds) room += room_of(factor);
  }
  const at::Tensor& like = factors[0]->value();
  const at::Tensor all = at::empty({room}, at::TensorOptions().dtype(wide).device(like.device()));
  room = 0;
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const Parameter& factor = *factors[i];
    if (!factor.trainable() || sums[i].adds) continue;
    sums[i].sum = part_of(all, room, factor.local_shape());
    room += room_of(factor);
  }
  product(sums);
  for (std::size_t i = 0; i < factors.size(); ++i)
    if (sums[i].sum.defined() && !sums[i].adds) factors[i]->add_gradient(sums[i].sum);
}

}  // namespace

void GroupedChanges::add(std::int64_t first, std::int64_t rows,
                         const std::vector<ChangedLinear>& layers) {
  ops::LowRankRows group{first, rows, {}};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    LowRank* const change = layers[i].change;
    if (change == nullptr) continue;
    group.changes.push_back({i, change->a().value(), change->b().value(), change->scaling()});
    changes_.push_back(change);
  }
  groups_.push_back(std::move(group));
}

void GroupedChanges::forward(const at::Tensor& x) {
  if (!is_empty()) lows_ = functions_->lows(x, groups_);
}

ops::Tensors GroupedChanges::outputs(const ops::Linear::Functions& linear,
                                     const std::vector<ops::Products>& sums,
                                     const at::Tensor& residual) const {
  if (is_empty()) return {};
  return ops::outputs_with_lows(linear, sums, residual, lows_, groups_);
}

void GroupedChanges::add_to(const ops::Tensors& outputs) const {
  if (!is_empty()) functions_->add_outputs(outputs, lows_, groups_);
}

at::Tensor GroupedChanges::backward(const ops::Tensors& dy) const {
  if (is_empty()) return {};
  std::vector<Parameter*> factors;
  for (LowRank* const change : changes_) factors.push_back(&change->b());
  at::Tensor d_lows;
  accumulate(factors, [&](const std::vector<ops::FactorSum>& sums) {
    d_lows = functions_->d_lows_and_gradients_of_b(dy, lows_, groups_, sums);
  });
  return d_lows;
}

at::Tensor GroupedChanges::input_gradient(const ops::Linear::Functions& linear,
                                          const ops::Products& terms,
                                          const at::Tensor& d_lows) const {
  if (is_empty()) return linear.backward(terms);
  at::Tensor dx = ops::input_gradient_with_lows(linear, terms, d_lows, groups_);
  if (dx.defined()) return dx;
  dx = linear.backward(terms);
  functions_->add_input_gradient(dx, d_lows, groups_);
  return dx;
}

void GroupedChanges::add_gradients_of_a(const at::Tensor& x, const at::Tensor& d_lows) const {
  if (is_empty()) return;
  std::vector<Parameter*> factors;
  for (LowRank* const change : changes_) factors.push_back(&change->a());
  accumulate(factors, [&](const std::vector<ops::FactorSum>& sums) {
    functions_->gradients_of_a(x, d_lows, groups_, sums);
  });
}

}  // namespace heddle::nn
