#include "adapters/expert_lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mm.h>

#include <utility>

#include "adapters/initialize.h"
#include "base/errors.h"
#include "ops/autograd.h"

namespace heddle::adapters {

namespace {

/// A whole factor with an entry for each of `experts`.
at::Tensor by_expert(const at::Tensor& whole, std::int64_t experts) {
  return whole.size(0) == experts ? whole : whole.cpu().expand({experts, -1, -1});
}

}  // namespace

ExpertLora::ExpertLora(std::string parameter, nn::ExpertWeights& weights, double scaling,
                       std::int64_t rank, std::uint64_t seed, nn::ExpertFactors factors)
    : LowRankExperts(parameter, weights, scaling, rank, factors),
      parameter_(std::move(parameter)),
      seed_(seed) {}

void ExpertLora::initialize() {
  fill_kaiming(a(), seed_);
  b().owned().zero_();
}

at::Tensor ExpertLora::delta(std::int64_t e) const {
  const ops::NoGradient guard;
  const auto wide = a().value().scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::mm(b_of(e).to(wide), a_of(e).to(wide)) * scaling();
}

at::Tensor ExpertLora::peft_a(const at::Tensor& whole) const {
  return compact_a(by_expert(whole, experts()));
}

at::Tensor ExpertLora::peft_b(const at::Tensor& whole) const {
  return compact_b(by_expert(whole, experts()));
}

at::Tensor ExpertLora::compact_a(const at::Tensor& whole) const {
  return whole.reshape({whole.size(0) * rank(), a().global_shape()[2]});
}

at::Tensor ExpertLora::compact_b(const at::Tensor& whole) const {
  return whole.permute({1, 2, 0}).reshape({b().global_shape()[1], rank() * whole.size(0)});
}

at::Tensor ExpertLora::as_shared(const at::Tensor& by_expert, const nn::Parameter& factor) const {
  if (by_expert.size(0) == factor.global_shape()[0]) return by_expert;
  at::Tensor first = by_expert.narrow(0, 0, 1);
  for (std::int64_t e = 1; e < by_expert.size(0); ++e) {
    if (at::equal(first[0], by_expert[e])) continue;
    throw_error<ModelError>(
        "the adapter of '{}' has another {} for expert {} than for expert 0, and the experts are "
        "to share it (adapter.shared_expert_factors)",
        parameter_, &factor == &a() ? "A" : "B", e);
  }
  return first;
}

void ExpertLora::set_from_peft(const at::Tensor& stored_a, const at::Tensor& stored_b) {
  const ops::NoGradient guard;
  const std::int64_t experts = this->experts(), out = b().global_shape()[1],
                     in = a().global_shape()[2];
  // A factor that the experts share may be there once.
  const auto entries = [&](std::int64_t stored, const nn::Parameter& factor) {
    return stored == rank() ? factor.global_shape()[0] : experts;
  };
  const std::int64_t of_a = entries(stored_a.size(0), a()), of_b = entries(stored_b.size(1), b());
  if (stored_a.sizes() != at::IntArrayRef({of_a * rank(), in}) ||
      stored_b.sizes() != at::IntArrayRef({out, rank() * of_b})) {
    throw_error<ModelError>(
        "the adapter of '{}' has A [{}] and B [{}], this model's {} experts with rank {} need "
        "[{}, {}] and [{}, {}]",
        parameter_, fmt::join(stored_a.sizes(), ", "), fmt::join(stored_b.sizes(), ", "), experts,
        rank(), experts * rank(), in, out, rank() * experts);
  }
  set(stored_a.view({of_a, rank(), in}), stored_b.view({out, rank(), of_b}).permute({2, 0, 1}));
}

void ExpertLora::set(const at::Tensor& whole_a, const at::Tensor& whole_b) {
  const ops::NoGradient guard;
  a().write_owned(as_shared(whole_a, a()));
  b().write_owned(as_shared(whole_b, b()));
}

}  // namespace heddle::adapters
