#pragma once

#include <ATen/ops/empty.h>

#include <cstring>
#include <span>
#include <vector>

namespace heddle::ops::cuda {

/// The host's bytes of a table.
template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& table) {
  return std::as_bytes(std::span(table));
}

/// Copies of tables on a device, made by one transfer for which the host does not wait. Work that is
/// queued on the current stream may read them after this object is gone.
class StoredTables {
 public:
  StoredTables(c10::Device device, const std::vector<std::span<const std::byte>>& tables) {
    std::int64_t size = 0;
    for (const auto& table : tables) {
      places_.push_back(size);
      size += (static_cast<std::int64_t>(table.size()) + kStep - 1) / kStep * kStep;
    }
    const at::Tensor host = at::empty({size}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    for (std::size_t i = 0; i < tables.size(); ++i) {
      if (!tables[i].empty())
        std::memcpy(host.mutable_data_ptr<std::uint8_t>() + places_[i], tables[i].data(),
                    tables[i].size());
    }
    there_ = host.to(device, /*non_blocking=*/true);
  }

  template <class T>
  const T* at(std::size_t table) const {
    return reinterpret_cast<const T*>(there_.const_data_ptr<std::uint8_t>() + places_[table]);
  }

 private:
  static constexpr std::int64_t kStep = 64;  // starts on which every entry lies well

  std::vector<std::int64_t> places_;
  at::Tensor there_;
};

}  // namespace heddle::ops::cuda
