#include "ops/grouped_low_rank/grouped_low_rank.h"

#include <ATen/ops/empty.h>

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

void register_grouped_low_rank(Registry& registry) {
  // Nothing is gained on a CPU, where each set then has the bits that it has alone.
  registry.add<GroupedLowRank>(KernelInfo::cpu("cpu.set_by_set"), {});
  registry.add<GroupedLowRank>(KernelInfo::reference(), grouped_low_rank_reference::functions());
}

}  // namespace heddle::ops
