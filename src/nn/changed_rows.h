#pragma once

#include <cstdint>
#include <vector>

#include "nn/low_rank.h"

namespace heddle::nn {

/// Consecutive rows of an input, and layers with the changes that they have there.
struct ChangedRows {
  std::int64_t rows;
  std::vector<ChangedLinear> layers;

  bool has_change() const;
};

/// Runs changed_linears() of these layers for segments of rows, each with changes of its own:
/// `segments` are all rows in order. They share the products of the weights, and each adds its own
/// change to its rows.
std::vector<at::Tensor> changed_linears(const ops::KernelTable& kernels, const LinearInput& x,
                                        std::vector<ChangedRows> segments);

}  // namespace heddle::nn
