#pragma once

#include "ops/autograd.h"
#include "ops/linear/dropout.h"
#include "ops/linear/place.h"
#include "ops/registry.h"

namespace heddle::ops {

/// One product of a sum of products.
struct Product {
  at::Tensor a, b;
  LinearPlace place = {};  ///< The layer's whose weight is `b`.
};
using Products = std::vector<Product>;

/// A low-rank change of an output in its backward: y += low b^T.
struct LowRankChange {
  at::Tensor dy;   ///< [T,n]
  at::Tensor b;    ///< [n,r]
  at::Tensor low;  ///< [T,r]
};

/// The products of linear layers, as sums: a low-rank change of a weight is a second term of its
/// layer's output, and the gradients of layers that share an input are terms of one gradient. Not
/// differentiable by themselves; see nn/linear.h.
struct Linear {
  static constexpr const char* kName = "linear";
  /// The layers that are trained, on this rank; empty where none is.
  struct Dims {
    struct Layer {
      std::string name;  ///< The module within its block: "mlp.up_proj".
      std::int64_t out = 0, in = 0;
    };
    std::vector<Layer> layers;
    std::int64_t adapter_rank = 0;  ///< Rank of their low-rank changes; 0: they have none.
  };
  struct Functions {
    /// For each sum, y [T,n] = sum of a b^T over its terms: a [T,k], b [n,k]; T is that of all.
    Tensors (*forward)(const std::vector<Products>& sums);
    /// x [T,n] + the sum of a b^T over the terms.
    at::Tensor (*forward_onto)(const at::Tensor& x, const Products& terms);
    /// sum of a b over the terms: a [T,n], b [n,k] -> [T,k].
    at::Tensor (*backward)(const Products& terms);
    struct LowRankGradients {
      at::Tensor d_low;  ///< dy b of all changes side by side, [T, sum of r]
      Tensors d_b;       ///< dy^T low of each, [n,r], not narrower than dy
    };
    /// At least one change; T is that of all.
    LowRankGradients (*low_rank_backward)(const std::vector<LowRankChange>& changes);
    /// x a^T of what each factor sees of x [T,k]: [T, sum of r].
    at::Tensor (*dropped_low)(const at::Tensor& x, const DroppedFactors& factors);
    /// d_low^T of the same: the gradients of the factors, [sum of r,k], not narrower than x.
    at::Tensor (*dropped_gradient)(const at::Tensor& x, const at::Tensor& d_low,
                                   const DroppedFactors& factors);
    /// dx [T,k] += of each factor's part of d_low a, [T,k], what it sees.
    void (*add_dropped)(at::Tensor& dx, const at::Tensor& d_low, const DroppedFactors& factors);
  };
};

/// scale dy^T x, the gradient of a matrix; of half precision on a GPU in fp32, as it is summed
/// there.
at::Tensor wide_product(const at::Tensor& dy, const at::Tensor& x, double scale = 1);

}  // namespace heddle::ops
