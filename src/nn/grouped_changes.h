#pragma once

#include <cstdint>
#include <vector>

#include "nn/low_rank.h"
#include "ops/grouped_low_rank/grouped_low_rank.h"

namespace heddle::nn {

/// The low-rank changes that segments of rows have in layers with one input: each kind of product
/// is one call for all of them. A copy shares what the forward left.
class GroupedChanges {
 public:
  GroupedChanges() = default;
  explicit GroupedChanges(const ops::GroupedLowRank::Functions& functions)
      : functions_(&functions) {}
  /// Rows [first, first + rows) have the changes of these layers.
  void add(std::int64_t first, std::int64_t rows, const std::vector<ChangedLinear>& layers);
  bool is_empty() const { return changes_.empty(); }

  /// Reads x and adds the changes to the layers' outputs, unless there are none.
  void forward(const at::Tensor& x, const ops::Tensors& outputs);
  /// Accumulates the gradients of all B; returns those of the lows, which the rest needs.
  at::Tensor backward(const ops::Tensors& dy) const;
  void add_input_gradient(const at::Tensor& dx, const at::Tensor& d_lows) const;
  /// Accumulates the gradients of all A.
  void add_gradients_of_a(const at::Tensor& x, const at::Tensor& d_lows) const;

 private:
  const ops::GroupedLowRank::Functions* functions_ = nullptr;
  ops::LowRankGroups groups_;
  std::vector<LowRank*> changes_;  ///< In the order of the groups.
  at::Tensor lows_;
};

}  // namespace heddle::nn
