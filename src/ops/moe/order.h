#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// The assignments (t, j) in the order of their experts, ties in the order of t: what the
/// kernels of moe_experts work on. N = T x k, less those of no expert.
struct MoeOrder {
  at::Tensor source;                 ///< [N] int64: the assignment t * k + j at each sorted place.
  at::Tensor place;                  ///< [T x k] int64: the sorted place of each assignment; those
                                     ///< of no expert have the places from N on.
  at::Tensor token;                  ///< [N] int64: source / k.
  std::vector<std::int64_t> starts;  ///< [E+1] on the host: first place of each expert.
  std::int64_t top_k = 1;            ///< k
};

/// Sorts by expert, and waits for a device to learn `starts`. TORCH_CHECKs that the indices lie in
/// [0, expert_count) or, with `assignments`, that so many do and the others are expert_count. Where
/// tensors are shapes (the meta device), every expert is taken to be chosen equally often.
MoeOrder moe_order(const at::Tensor& experts, std::int64_t expert_count,
                   std::optional<std::int64_t> assignments = {});

/// An order that a device works out without the host, which learns nothing and so checks nothing:
/// not how many there are of no expert either.
struct DeviceMoeOrder {
  at::Tensor source;  ///< [T x k] As in MoeOrder, and after those the assignments of no expert.
  at::Tensor place;   ///< [T x k] As in MoeOrder.
  at::Tensor ends;    ///< [E] int32: where each expert's rows end.
};
DeviceMoeOrder device_moe_order(const at::Tensor& experts, std::int64_t expert_count);

/// rows [N,H]: row n is that of token source[n] / k of x [T,H].
at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& source, std::int64_t k);
/// y [T,H]: the sum over j < k of row place[t * k + j] of rows [N,H], where that is below N; added
/// up in fp32 or wider.
at::Tensor sum_rows(const at::Tensor& rows, const at::Tensor& place, std::int64_t k);

}  // namespace heddle::ops
