#pragma once

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::nn {

class ExpertWeights;
class Linear;
class LowRank;
class LowRankExperts;
class Parameter;
struct Pass;

/// Changes that a set of adapters makes to layers of a model. The layers do not know it: a pass
/// names the set of its rows.
class AdapterSet {
 public:
  /// Null for a layer that the set leaves as it is.
  LowRank* of(const Linear& layer) const;
  LowRankExperts* of(const ExpertWeights& weights) const;
  bool changes_experts() const { return !experts_.empty(); }
  /// The factors of one layer; none where the set leaves it as it is.
  void visit_factors(const Linear& layer, const std::function<void(Parameter&)>& visit) const;
  void visit_factors(const ExpertWeights& weights,
                     const std::function<void(Parameter&)>& visit) const;

 protected:
  /// Both live as long as the set.
  void put_on(const Linear& layer, LowRank& change) { linears_[&layer] = &change; }
  void put_on(const ExpertWeights& weights, LowRankExperts& change) {
    experts_[&weights] = &change;
  }

 private:
  std::unordered_map<const Linear*, LowRank*> linears_;
  std::unordered_map<const ExpertWeights*, LowRankExperts*> experts_;
};

/// Consecutive rows of a pass that have the same adapters.
struct AdaptedRows {
  const AdapterSet* set = nullptr;  ///< Null: the base model.
  std::int64_t rows = 0;
  at::Tensor draws;  ///< [rows], see ops::dropout_draws; undefined: nothing is dropped.
};

/// The adapters of a layer's input with `rows` rows: all of the pass or, where the ranks along tp
/// divide them, this rank's.
std::vector<AdaptedRows> adapters_of(const Pass& pass, std::int64_t rows);

}  // namespace heddle::nn
