#include "adapters/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>

#include <cmath>
#include <utility>

#include "adapters/initialize.h"
#include "base/hash.h"
#include "ops/autograd.h"

namespace heddle::adapters {

double LoraOptions::scaling() const {
  return rslora ? alpha / std::sqrt(static_cast<double>(rank)) : alpha / static_cast<double>(rank);
}

std::uint64_t dropout_key(std::uint64_t seed, const std::string& module) {
  return hash::of(module + "/dropout", seed);
}

Lora::Lora(std::string module, std::int64_t in_features, std::int64_t out_features, double scaling,
           std::int64_t rank, double dropout, std::uint64_t seed,
           const nn::Placement& weight_placement)
    : LowRank(module, in_features, out_features, scaling, rank,
              {dropout, dropout_key(seed, module)}, weight_placement),
      module_(std::move(module)),
      seed_(seed) {}

void Lora::initialize() {
  fill_kaiming(a(), seed_);
  b().owned().zero_();
}

at::Tensor Lora::delta() const {
  const ops::NoGradient guard;
  const auto wide = a().value().scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::mm(b().value().to(wide), a().value().to(wide)) * scaling();
}

}  // namespace heddle::adapters
