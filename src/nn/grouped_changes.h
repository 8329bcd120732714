#pragma once

#include <cstdint>
#include <vector>

#include "nn/low_rank.h"
#include "ops/grouped_low_rank/grouped_low_rank.h"
#include "ops/linear/linear.h"

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

  /// Reads x.
  void forward(const at::Tensor& x);
  /// The sums of the layers with their changes, onto the residual unless it is undefined; nothing
  /// where the kernels cannot: then add_to() them.
  ops::Tensors outputs(const ops::Linear::Functions& linear, const std::vector<ops::Products>& sums,
                       const at::Tensor& residual) const;
  void add_to(const ops::Tensors& outputs) const;
  /// Accumulates the gradients of all B; returns those of the lows, which the rest needs.
  at::Tensor backward(const ops::Tensors& dy) const;
  /// The sum of the terms with what comes through the changes.
  at::Tensor input_gradient(const ops::Linear::Functions& linear, const ops::Products& terms,
                            const at::Tensor& d_lows) const;
  /// Accumulates the gradients of all A.
  void add_gradients_of_a(const at::Tensor& x, const at::Tensor& d_lows) const;

 private:
  const ops::GroupedLowRank::Functions* functions_ = nullptr;
  ops::LowRankGroups groups_;
  std::vector<LowRank*> changes_;  ///< In the order of the groups.
  at::Tensor lows_;
};

}  // namespace heddle::nn
