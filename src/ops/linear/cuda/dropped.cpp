// Joins the kernels of low-rank changes under dropout with ATen.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <vector>

#include "ops/cuda/tensor.h"
#include "ops/linear/cuda/dropped.h"
#include "ops/linear/kernels.h"

namespace heddle::ops::linear_cuda {
namespace {

using Ranks = std::vector<std::int64_t>;

constexpr std::int64_t kRankMultiple = 8;

Ranks rounded_up(const Ranks& ranks) {
  Ranks rounded;
  for (const std::int64_t rank : ranks)
    rounded.push_back((rank + kRankMultiple - 1) / kRankMultiple * kRankMultiple);
  return rounded;
}

/// A matrix of which each factor has `from` rows (dim 0) or columns, to one in which it has `to`:
/// the rest are zeros, or left out.
at::Tensor with_ranks(const at::Tensor& matrix, std::int64_t dim, const Ranks& from,
                      const Ranks& to) {
  std::vector<std::int64_t> sizes = matrix.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = std::reduce(to.begin(), to.end());
  at::Tensor result = at::zeros(sizes, matrix.options());
  std::int64_t source = 0, target = 0;
  for (std::size_t f = 0; f < from.size(); ++f) {
    const std::int64_t common = std::min(from[f], to[f]);
    result.narrow(dim, target, common).copy_(matrix.narrow(dim, source, common));
    source += from[f], target += to[f];
  }
  return result;
}

DroppedFactors with_ranks(const DroppedFactors& factors, const Ranks& to) {
  return {with_ranks(factors.a, 0, factors.ranks, to), to, factors.masks};
}

/// Checks x or dx, and the small matrix beside its rows, which is undefined where it is made.
bool fits(const at::Tensor& x, const at::Tensor& low, const DroppedFactors& factors) {
  return cuda::has_rows_of_16_bytes(x) && (!low.defined() || cuda::has_rows_of_16_bytes(low)) &&
         cuda::has_rows_of_16_bytes(factors.a) && x.size(1) % cuda::kDroppedColumns == 0 &&
         std::all_of(factors.masks.begin(), factors.masks.end(), [&](const DropoutMask& mask) {
           return mask.in_runs && mask.threshold() == factors.masks[0].threshold() &&
                  mask.threshold() > 0;
         });
}

/// Factors, or parts of their ranks, that one launch takes, and the place of their first rank.
struct Launch {
  cuda::DroppedShape shape;
  std::int64_t first = 0, ranks = 0;
};

std::vector<Launch> launches(const at::Tensor& x, const DroppedFactors& factors) {
  const DropoutMask& mask = factors.masks.at(0);
  TORCH_CHECK(mask.draws.is_contiguous() && mask.features.is_contiguous() &&
                  mask.draws.numel() == x.size(0) && mask.features.numel() == x.size(1) &&
                  factors.a.size(1) == x.size(1),
              "dropout: ", x.sizes(), " with ", mask.draws.numel(), " draws, ",
              mask.features.numel(), " features and factors ", factors.a.sizes());
  cuda::DroppedShape empty;
  empty.rows = x.size(0), empty.width = x.size(1);
  empty.threshold = static_cast<std::uint32_t>(mask.threshold());
  empty.kept = static_cast<float>(mask.kept());
  empty.draws = mask.draws.const_data_ptr<std::int64_t>();
  empty.features = mask.features.const_data_ptr<std::int64_t>();
  std::vector<Launch> all;
  std::int64_t first = 0;
  for (std::size_t f = 0; f < factors.ranks.size(); ++f) {
    for (std::int64_t left = factors.ranks[f]; left > 0;) {
      // Kernels exist for 64, 32, 16 or 8 ranks of one factor.
      const auto part = static_cast<std::int64_t>(std::bit_floor(
          static_cast<std::uint64_t>(std::min<std::int64_t>(left, cuda::kMostDroppedRanks))));
      const bool joins = !all.empty() && all.back().shape.rank == part &&
                         all.back().shape.factors < cuda::kMostDroppedFactors &&
                         all.back().ranks + part <= cuda::kMostDroppedRanks;
      if (!joins) {
        all.push_back({empty, first, 0});
        all.back().shape.rank = static_cast<int>(part);
      }
      Launch& launch = all.back();
      launch.shape.keys[launch.shape.factors++] = factors.masks[f].key;
      launch.ranks += part;
      first += part;
      left -= part;
    }
  }
  TORCH_CHECK(first == factors.a.size(0), "dropout: factors of ", first, " ranks in ",
              factors.a.sizes());
  return all;
}

}  // namespace

at::Tensor dropped_low(const at::Tensor& x, const DroppedFactors& factors) {
  if (const Ranks ranks = rounded_up(factors.ranks); ranks != factors.ranks)
    return with_ranks(dropped_low(x, with_ranks(factors, ranks)), 1, ranks, factors.ranks);
  if (!fits(x, {}, factors)) return linear_reference::dropped_low(x, factors);
  const cuda::OnDevice on(x);
  at::Tensor low = at::empty({x.size(0), factors.a.size(0)}, x.options());
  for (const Launch& launch : launches(x, factors)) {
    const at::Tensor a = factors.a.narrow(0, launch.first, launch.ranks),
                     part = low.narrow(1, launch.first, launch.ranks);
    cuda::dropped_low(launch.shape, x.const_data_ptr(), x.stride(0), a.const_data_ptr(),
                      a.stride(0), part.mutable_data_ptr(), part.stride(0), on.stream());
  }
  return low;
}

at::Tensor dropped_gradient(const at::Tensor& x, const at::Tensor& d_low,
                            const DroppedFactors& factors) {
  if (const Ranks ranks = rounded_up(factors.ranks); ranks != factors.ranks) {
    const at::Tensor d_a =
        dropped_gradient(x, with_ranks(d_low, 1, factors.ranks, ranks), with_ranks(factors, ranks));
    return with_ranks(d_a, 0, ranks, factors.ranks);
  }
  if (!fits(x, d_low, factors)) return linear_reference::dropped_gradient(x, d_low, factors);
  const cuda::OnDevice on(x);
  at::Tensor d_a = at::empty(factors.a.sizes(), x.options().dtype(at::kFloat));
  for (const Launch& launch : launches(x, factors)) {
    const at::Tensor low = d_low.narrow(1, launch.first, launch.ranks),
                     workspace =
                         cuda::workspace_on(x, cuda::dropped_gradient_workspace(launch.shape));
    at::Tensor part = d_a.narrow(0, launch.first, launch.ranks);
    cuda::dropped_gradient(launch.shape, x.const_data_ptr(), x.stride(0), low.const_data_ptr(),
                           low.stride(0), part.mutable_data_ptr<float>(),
                           workspace.mutable_data_ptr<float>(), on.stream());
  }
  return d_a;
}

void add_dropped(at::Tensor& dx, const at::Tensor& d_low, const DroppedFactors& factors) {
  if (const Ranks ranks = rounded_up(factors.ranks); ranks != factors.ranks) {
    return add_dropped(dx, with_ranks(d_low, 1, factors.ranks, ranks), with_ranks(factors, ranks));
  }
  if (!fits(dx, d_low, factors)) return linear_reference::add_dropped(dx, d_low, factors);
  const cuda::OnDevice on(dx);
  const at::Tensor turned = factors.a.t().contiguous();
  for (const Launch& launch : launches(dx, factors)) {
    const at::Tensor low = d_low.narrow(1, launch.first, launch.ranks),
                     a = turned.narrow(1, launch.first, launch.ranks);
    cuda::add_dropped(launch.shape, dx.mutable_data_ptr(), dx.stride(0), low.const_data_ptr(),
                      low.stride(0), a.const_data_ptr(), a.stride(0), on.stream());
  }
}

}  // namespace heddle::ops::linear_cuda
