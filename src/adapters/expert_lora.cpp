#include "adapters/expert_lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>

#include <utility>

#include "adapters/initialize.h"
#include "base/errors.h"
#include "ops/autograd.h"

namespace heddle::adapters {

ExpertLora::ExpertLora(std::string parameter, nn::ExpertWeights& weights, double scaling,
                       std::int64_t rank, std::uint64_t seed)
    : LowRankExperts(parameter, weights, scaling, rank),
      parameter_(std::move(parameter)),
      seed_(seed) {}

void ExpertLora::initialize() {
  fill_kaiming(a(), seed_);
  b().owned().zero_();
}

at::Tensor ExpertLora::delta(std::int64_t e) const {
  const ops::NoGradient guard;
  const auto wide = a().value().scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::mm(b().value().select(0, e).to(wide), a().value().select(0, e).to(wide)) * scaling();
}

at::Tensor ExpertLora::peft_a(const at::Tensor& whole) const {
  return whole.reshape({a().global_shape()[0] * rank(), a().global_shape()[2]});
}

at::Tensor ExpertLora::peft_b(const at::Tensor& whole) const {
  return whole.permute({1, 2, 0}).reshape({b().global_shape()[1], rank() * a().global_shape()[0]});
}

void ExpertLora::set_from_peft(const at::Tensor& stored_a, const at::Tensor& stored_b) {
  const ops::NoGradient guard;
  const std::int64_t experts = a().global_shape()[0], out = b().global_shape()[1],
                     in = a().global_shape()[2];
  if (stored_a.sizes() != at::IntArrayRef({experts * rank(), in}) ||
      stored_b.sizes() != at::IntArrayRef({out, rank() * experts})) {
    throw_error<ModelError>(
        "the adapter of '{}' has A [{}] and B [{}], this model's {} experts with rank {} need "
        "[{}, {}] and [{}, {}]",
        parameter_, fmt::join(stored_a.sizes(), ", "), fmt::join(stored_b.sizes(), ", "), experts,
        rank(), experts * rank(), in, out, rank() * experts);
  }
  a().write_owned(stored_a.view({experts, rank(), in}));
  b().write_owned(stored_b.view({out, rank(), experts}).permute({2, 0, 1}));
}

}  // namespace heddle::adapters
