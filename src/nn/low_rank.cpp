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

LowRankExperts::LowRankExperts(const std::string& parameter, ExpertWeights& weights, double scaling,
                               std::int64_t rank)
    : a_(parameter + ".lora_A.weight", {weights.experts(), rank, weights.in_features()},
         weights.weight().placement()),
      b_(parameter + ".lora_B.weight", {weights.experts(), weights.out_features(), rank},
         weights.weight().placement()),
      scaling_(scaling) {}

ops::ExpertLowRank LowRankExperts::change() const { return {a_.value(), b_.value() * scaling_}; }

}  // namespace heddle::nn
