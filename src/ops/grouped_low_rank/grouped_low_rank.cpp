#include "ops/grouped_low_rank/grouped_low_rank.h"

#include <ATen/ops/empty.h>

#include <bit>

#include "ops/builtin.h"
#include "ops/grouped_low_rank/kernels.h"

namespace heddle::ops {

std::int64_t LowRankRows::column_of(std::size_t change) const {
  constexpr std::int64_t kRun = 8;  // bf16 elements in 16 bytes
  std::int64_t column = 0;
  for (std::size_t i = 0; i < change; ++i)
    column += (changes[i].a.size(0) + kRun - 1) / kRun * kRun;
  return column;
}

at::Tensor empty_lows(const at::Tensor& like, const LowRankGroups& groups) {
  std::int64_t elements = 0;
  for (const LowRankRows& rows : groups) elements += rows.rows * rows.width();
  return at::empty({elements}, like.options());
}

at::Tensor slot_entry(const at::Tensor& a, const at::Tensor& b, double scaling) {
  at::Tensor entry = at::empty({3}, at::kLong);
  auto* const numbers = entry.mutable_data_ptr<std::int64_t>();
  const auto address = [](const at::Tensor& factor) {
    return factor.defined()
               ? static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(factor.const_data_ptr()))
               : 0;
  };
  const std::int64_t rank = a.defined() ? a.size(0) : 0;
  TORCH_CHECK(rank == 0 || (a.is_contiguous() && b.is_contiguous() && b.size(1) == rank),
              "factors of a slot of ", rank == 0 ? at::IntArrayRef() : b.sizes(),
              ", which are not contiguous or of different ranks");
  numbers[0] = address(a);
  numbers[1] = address(b);
  const auto scale = std::bit_cast<std::uint32_t>(static_cast<float>(scaling));
  numbers[2] = static_cast<std::int64_t>(static_cast<std::uint64_t>(scale) << 32) | rank;
  return entry;
}

void register_grouped_low_rank(Registry& registry) {
  // Nothing is gained on a CPU, where each set then has the bits that it has alone.
  registry.add<GroupedLowRank>(KernelInfo::cpu("cpu.set_by_set"), {});
  registry.add<GroupedLowRank>(KernelInfo::reference(), grouped_low_rank_reference::functions());
}

}  // namespace heddle::ops
