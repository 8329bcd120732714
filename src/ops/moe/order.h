#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// The assignments (t, j) in the order of their experts, ties in the order of t: what the
/// kernels of moe_experts work on. N = T x k.
struct MoeOrder {
  at::Tensor source;                 ///< [N] int64: the assignment t * k + j at each sorted place.
  at::Tensor place;                  ///< [N] int64: the sorted place of each assignment.
  at::Tensor token;                  ///< [N] int64: source / k.
  std::vector<std::int64_t> starts;  ///< [E+1] on the host: first place of each expert.
  std::int64_t top_k = 1;            ///< k
};

/// Sorts by expert, and waits for a device to learn `starts`. TORCH_CHECKs that the indices lie in
/// [0, expert_count), on CUDA that they are below. Where tensors are shapes (the meta device),
/// every expert is taken to be chosen equally often.
MoeOrder moe_order(const at::Tensor& experts, std::int64_t expert_count);

/// What of it a device works out without the host, which learns nothing and so checks nothing.
struct DeviceMoeOrder {
  at::Tensor source, place;  ///< As in MoeOrder.
  at::Tensor ends;           ///< [E] int32: where each expert's rows end.
};
DeviceMoeOrder device_moe_order(const at::Tensor& experts, std::int64_t expert_count);

/// The rows [N,H] of x [T,H] in that order, one for each assignment. Differentiable.
at::Tensor moe_permute(const at::Tensor& x, const MoeOrder& order);
/// The weights [N,1] of the assignments, from [T,k]. Differentiable.
at::Tensor moe_permute_weights(const at::Tensor& weights, const MoeOrder& order);
/// y [T,H]: y[t] = sum over j of the row of assignment (t,j) of rows [N,H]. Differentiable.
at::Tensor moe_unpermute(const at::Tensor& rows, const MoeOrder& order);

}  // namespace heddle::ops
