#pragma once

#include <optional>
#include <vector>

#include "ops/grouped_low_rank/grouped_low_rank.h"
#include "ops/linear/linear.h"
#include "ops/norm_weight.h"

namespace heddle::ops {

/// Linear layers that read the same few rows, with what stands before and after their products: a
/// token of a few sequences has no time for launches of their own. All detached.
struct FewRowLayers {
  struct Layer {
    at::Tensor weight;  ///< [out,k]
    at::Tensor a, b;    ///< [r,k], [out,r]: y += scaling (x a^T) b^T; undefined: no such change.
    double scaling = 1;
  };
  at::Tensor x;                    ///< [T,k]
  std::optional<NormWeight> norm;  ///< The layers read rms_norm(x) with it and `eps`.
  double eps = 0;
  std::vector<Layer> layers;
  at::Tensor residual;  ///< [T,out], unless undefined: added to the output of a single layer.
  /// Changes of rows whose sets stand in tables, in the place of the layers' own.
  std::optional<LowRankSlots> slots;
  bool is_gated = false;  ///< Two layers have one output, silu of the first times the second.
};

/// The layers' outputs [T,out]; nothing where the chosen kernels have no such launch for them.
Tensors few_row_layers(const KernelTable& kernels, const FewRowLayers& call);

}  // namespace heddle::ops
