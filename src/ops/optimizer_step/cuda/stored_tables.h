#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <vector>

namespace heddle::ops::cuda {

/// The host's bytes of a table.
template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& table) {
  return std::as_bytes(std::span(table));
}

/// Copies of tables on a device, made by one transfer for which the host does not wait. Work that
/// is queued on the current stream may read them after this object is gone.
class StoredTables {
 public:
  StoredTables(c10::Device device, const std::vector<std::span<const std::byte>>& tables);

  template <class T>
  const T* at(std::size_t table) const {
    return reinterpret_cast<const T*>(there_.const_data_ptr<std::uint8_t>() + places_[table]);
  }

 private:
  std::vector<std::int64_t> places_;
  at::Tensor there_;
};

}  // namespace heddle::ops::cuda
