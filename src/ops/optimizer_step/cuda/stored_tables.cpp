#include "ops/optimizer_step/cuda/stored_tables.h"

#include <ATen/ops/empty.h>

#include <cstring>

namespace heddle::ops::cuda {
namespace {

constexpr std::int64_t kStep = 64;  // starts on which every entry lies well

}  // namespace

StoredTables::StoredTables(c10::Device device,
                           const std::vector<std::span<const std::byte>>& tables) {
  std::int64_t size = 0;
  for (const auto& table : tables) {
    places_.push_back(size);
    size += (static_cast<std::int64_t>(table.size()) + kStep - 1) / kStep * kStep;
  }
  const at::Tensor host =
      at::empty({size}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  for (std::size_t i = 0; i < tables.size(); ++i) {
    if (!tables[i].empty())
      std::memcpy(host.mutable_data_ptr<std::uint8_t>() + places_[i], tables[i].data(),
                  tables[i].size());
  }
  there_ = host.to(device, /*non_blocking=*/true);
}

}  // namespace heddle::ops::cuda
