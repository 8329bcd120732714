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
    : parameter_(std::move(parameter)),
      a_(parameter_ + ".lora_A.weight", {weights.experts(), rank, weights.in_features()},
         weights.weight().placement()),
      b_(parameter_ + ".lora_B.weight", {weights.experts(), weights.out_features(), rank},
         weights.weight().placement()),
      scaling_(scaling),
      seed_(seed) {}

ops::ExpertLowRank ExpertLora::change() { return {a_.value(), b_.value() * scaling_}; }

void ExpertLora::visit_parameters(const std::function<void(nn::Parameter&)>& visit) {
  visit(a_);
  visit(b_);
}

void ExpertLora::initialize() {
  fill_kaiming(a_, seed_);
  b_.owned().zero_();
}

at::Tensor ExpertLora::delta(std::int64_t e) const {
  const ops::NoGradient guard;
  const auto wide = a_.value().scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::mm(b_.value().select(0, e).to(wide), a_.value().select(0, e).to(wide)) * scaling_;
}

at::Tensor ExpertLora::peft_a(const at::Tensor& whole) const {
  return whole.reshape({a_.global_shape()[0] * rank(), a_.global_shape()[2]});
}

at::Tensor ExpertLora::peft_b(const at::Tensor& whole) const {
  return whole.permute({1, 2, 0}).reshape({b_.global_shape()[1], rank() * a_.global_shape()[0]});
}

void ExpertLora::set_from_peft(const at::Tensor& a, const at::Tensor& b) {
  const ops::NoGradient guard;
  const std::int64_t experts = a_.global_shape()[0], out = b_.global_shape()[1],
                     in = a_.global_shape()[2];
  if (a.sizes() != at::IntArrayRef({experts * rank(), in}) ||
      b.sizes() != at::IntArrayRef({out, rank() * experts})) {
    throw_error<ModelError>(
        "the adapter of '{}' has A [{}] and B [{}], this model's {} experts with rank {} need "
        "[{}, {}] and [{}, {}]",
        parameter_, fmt::join(a.sizes(), ", "), fmt::join(b.sizes(), ", "), experts, rank(),
        experts * rank(), in, out, rank() * experts);
  }
  a_.write_owned(a.view({experts, rank(), in}));
  b_.write_owned(b.view({out, rank(), experts}).permute({2, 0, 1}));
}

}  // namespace heddle::adapters
