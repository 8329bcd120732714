#include "objective/support_table.h"

#include <ATen/ops/full.h>

#include <algorithm>

#include "device/upload.h"

namespace heddle::objective {

at::Tensor support_table(const Supports& supports, std::span<const std::int64_t> places,
                         c10::Device device) {
  std::size_t widest = 1;
  for (const std::int64_t place : places)
    widest = std::max(widest, supports[static_cast<std::size_t>(place)].size());
  at::Tensor table =
      at::full({std::ssize(places), static_cast<std::int64_t>(widest)}, -1, at::kLong);
  auto* entry = table.mutable_data_ptr<std::int64_t>();
  for (const std::int64_t place : places) {
    std::ranges::copy(supports[static_cast<std::size_t>(place)], entry);
    entry += widest;
  }
  return device::upload(table, device);
}

}  // namespace heddle::objective
