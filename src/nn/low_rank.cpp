#include "nn/low_rank.h"

#include <algorithm>
#include <iterator>

#include <ATen/TensorOperators.h>

#include "device/upload.h"

namespace heddle::nn {

namespace {

/// The part of the weight's placement that divides one of its dimensions.
Placement along(const Placement& weight, std::int64_t tensor_dim) {
  Placement placement;
  std::copy_if(weight.begin(), weight.end(), std::back_inserter(placement),
               [&](const Shard& shard) { return shard.tensor_dim == tensor_dim; });
  return placement;
}

/// See ops::DropoutMask.
bool in_runs(const std::vector<std::int64_t>& features) {
  constexpr std::size_t kRun = 8;
  for (std::size_t i = 0; i < features.size(); ++i) {
    const std::int64_t first = features[i / kRun * kRun];
    if (first % kRun != 0 || features[i] != first + static_cast<std::int64_t>(i % kRun))
      return false;
  }
  return features.size() % kRun == 0;
}

}  // namespace

LowRank::LowRank(const std::string& module, std::int64_t in_features, std::int64_t out_features,
                 double scaling, std::int64_t rank, LowRankDropout dropout,
                 const Placement& weight_placement)
    : a_(module + ".lora_A.weight", {rank, in_features}, along(weight_placement, 1)),
      b_(module + ".lora_B.weight", {out_features, rank}, along(weight_placement, 0)),
      scaling_(scaling),
      dropout_(dropout) {
  // Where the weight is divided, the other factor is whole and sees the work of one rank.
  if (!a_.placement().empty()) b_.set_partial_gradient();
  if (!b_.placement().empty()) a_.set_partial_gradient();
}

std::optional<ops::DropoutMask> LowRank::mask_of(const at::Tensor& x, const at::Tensor& draws) {
  if (dropout_.probability == 0 || !draws.defined()) return std::nullopt;
  if (!features_.defined()) {
    const std::vector<std::int64_t> features = a_.global_indices(1);
    features_in_runs_ = in_runs(features);
    features_ = device::upload(features, x.device());
  }
  ops::DropoutMask mask{dropout_.key, draws, features_, dropout_.probability, features_in_runs_};
  if (mask.threshold() == 0) return std::nullopt;
  return mask;
}

namespace {

/// Whether the factor on this side of the weights is one for all experts.
bool is_shared(ExpertFactors factors, const ExpertWeights& weights,
               ExpertWeights::HiddenSide side) {
  return factors == ExpertFactors::kSharedOuter && weights.hidden_side() == side;
}

/// A factor of every expert, divided as they are, or one for all that every rank has whole.
Parameter factor_of(std::string name, ExpertWeights& weights, bool shared, std::int64_t rows,
                    std::int64_t columns) {
  return {std::move(name),
          {shared ? 1 : weights.experts(), rows, columns},
          shared ? Placement() : weights.weight().placement()};
}

at::Tensor of_expert(const Parameter& factor, std::int64_t e) {
  return factor.data().select(0, factor.global_shape()[0] == 1 ? 0 : e);
}

}  // namespace

LowRankExperts::LowRankExperts(const std::string& parameter, ExpertWeights& weights, double scaling,
                               std::int64_t rank, ExpertFactors factors)
    : a_(factor_of(parameter + ".lora_A.weight", weights,
                   is_shared(factors, weights, ExpertWeights::HiddenSide::kInput), rank,
                   weights.in_features())),
      b_(factor_of(parameter + ".lora_B.weight", weights,
                   is_shared(factors, weights, ExpertWeights::HiddenSide::kOutput),
                   weights.out_features(), rank)),
      scaling_(scaling),
      experts_(weights.experts()),
      factors_(factors) {
  // Each rank has worked on its own experts or rows.
  for (Parameter* const factor : {&a_, &b_})
    if (!factor->is_expert()) factor->set_partial_gradient();
}

at::Tensor LowRankExperts::a_of(std::int64_t e) const { return of_expert(a_, e); }
at::Tensor LowRankExperts::b_of(std::int64_t e) const { return of_expert(b_, e); }

ops::ExpertLowRank LowRankExperts::change() const { return {a_.value(), b_.value() * scaling_}; }

}  // namespace heddle::nn
