#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "assembly/model_on_ranks.h"

namespace heddle::rollout {

/// The matrices of a model with its own adapters added, W + s B A: a pass over them reads and
/// multiplies as much as the base model's. W stays beside them, in as much memory again, and each
/// sum begins from it, in fp32 and rounded once to W's dtype, so that nothing drifts.
class MergedAdapter {
 public:
  /// `placed` outlives it. Throws ConfigError if the model has no adapters, and for matrices whose
  /// values are not whole on this rank between passes (assembly/merged_adapter.h).
  explicit MergedAdapter(assembly::ModelOnRanks& placed);
  ~MergedAdapter() { take_out(); }
  MergedAdapter(const MergedAdapter&) = delete;
  MergedAdapter& operator=(const MergedAdapter&) = delete;

  /// The factors have other values: the next put_in() adds anew.
  void factors_changed() { is_current_ = false; }
  /// The sums take the places of W, whose memory is kept. Passes run without the adapters then.
  void put_in();
  /// W is back in its place.
  void take_out();

 private:
  struct Matrix {
    nn::Parameter* weight;
    std::function<void(const at::Tensor& sum)> add;  ///< Writes weight + change into `sum`.
    at::Tensor other;  ///< The sum, or W while the sum is in its place.
  };
  void add(nn::Parameter& weight, std::function<void(const at::Tensor& sum)> add);
  void exchange();

  std::vector<Matrix> matrices_;
  bool is_in_ = false, is_current_ = false;
};

}  // namespace heddle::rollout
