#include "ops/cache_rows.h"

#include <algorithm>
#include <utility>

#include "device/upload.h"

namespace heddle::ops {

CacheRows CacheRows::from_host(std::vector<std::int64_t> slots, std::vector<std::int64_t> lengths,
                               c10::Device device) {
  TORCH_CHECK(slots.size() == lengths.size(), "cache rows: ", slots.size(), " slots but ",
              lengths.size(), " lengths");
  CacheRows rows;
  for (std::size_t b = 0; b < slots.size(); ++b) {
    TORCH_CHECK(slots[b] >= 0 && lengths[b] >= 0, "cache rows: sequence ", b, " has slot ",
                slots[b], " and length ", lengths[b], "; neither may be negative");
    rows.longest = std::max(rows.longest, lengths[b]);
  }
  rows.slots = device::upload(slots, device);
  rows.lengths = device::upload(lengths, device);
  rows.slots_host = std::move(slots);
  rows.lengths_host = std::move(lengths);
  return rows;
}

void CacheRows::check(const char* op, std::int64_t batch, std::int64_t slots_of_cache) const {
  TORCH_CHECK(count() == batch, op, ": ", count(), " cache rows for ", batch, " sequences");
  for (std::size_t b = 0; b < slots_host.size(); ++b) {
    TORCH_CHECK(slots_host[b] < slots_of_cache, op, ": sequence ", b, " has slot ", slots_host[b],
                " of ", slots_of_cache);
  }
}

}  // namespace heddle::ops
