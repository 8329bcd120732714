#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace heddle::data {

/// Groups of items, stored flat: group g holds items[starts[g] .. starts[g+1]).
struct Groups {
  std::vector<std::int64_t> items;
  std::vector<std::int64_t> starts = {0};

  std::int64_t size() const { return static_cast<std::int64_t>(starts.size()) - 1; }
  std::span<const std::int64_t> operator[](std::int64_t group) const {
    return std::span(items).subspan(starts[group], starts[group + 1] - starts[group]);
  }
};

/// Best-fit decreasing: every item goes, longest first, to the fullest group that still has room,
/// else to a new group. lengths[i] is the length of item i; `order` names the items, ties keep its
/// order, and so do the items of a group. Groups hold at most `capacity`. Throws DataError when an
/// item is longer. O(n log n).
Groups pack_best_fit(std::span<const std::int64_t> order, std::span<const std::int64_t> lengths,
                     std::int64_t capacity);

/// Packs consecutive windows of `window` items of `order`, so that memory and mixing stay
/// bounded.
Groups pack_in_windows(std::span<const std::int64_t> order, std::span<const std::int64_t> lengths,
                       std::int64_t capacity, std::int64_t window);

}  // namespace heddle::data
