#include "data/packing/packing.h"

#include <algorithm>
#include <map>

#include "base/errors.h"

namespace heddle::data {

Groups pack_best_fit(std::span<const std::int64_t> order, std::span<const std::int64_t> lengths,
                     std::int64_t capacity) {
  // Positions in `order`, longest item first; equal lengths keep the given order.
  std::vector<std::int64_t> by_length(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) by_length[i] = static_cast<std::int64_t>(i);
  const auto length_at = [&](std::int64_t position) { return lengths[order[position]]; };
  std::stable_sort(by_length.begin(), by_length.end(),
                   [&](std::int64_t a, std::int64_t b) { return length_at(a) > length_at(b); });

  std::vector<std::vector<std::int64_t>> bins;
  // Room left -> bins with that room, the last put there on top; an ordered map, so that the result
  // is the same everywhere.
  std::map<std::int64_t, std::vector<std::int64_t>> by_room;
  for (const std::int64_t position : by_length) {
    const std::int64_t length = length_at(position);
    if (length > capacity) {
      throw_error<DataError>("row {} has {} tokens, more than the {} of a packed row",
                             order[position], length, capacity);
    }
    const auto fullest = by_room.lower_bound(length);
    std::int64_t bin, room;
    if (fullest == by_room.end()) {
      bin = static_cast<std::int64_t>(bins.size());
      bins.emplace_back();
      room = capacity;
    } else {
      bin = fullest->second.back();
      room = fullest->first;
      fullest->second.pop_back();
      if (fullest->second.empty()) by_room.erase(fullest);
    }
    bins[bin].push_back(position);
    if (room > length) by_room[room - length].push_back(bin);
  }

  Groups groups;
  groups.items.reserve(order.size());
  groups.starts.reserve(bins.size() + 1);
  for (std::vector<std::int64_t>& bin : bins) {
    std::sort(bin.begin(), bin.end());
    for (const std::int64_t position : bin) groups.items.push_back(order[position]);
    groups.starts.push_back(static_cast<std::int64_t>(groups.items.size()));
  }
  return groups;
}

Groups pack_in_windows(std::span<const std::int64_t> order, std::span<const std::int64_t> lengths,
                       std::int64_t capacity, std::int64_t window) {
  const auto step = static_cast<std::size_t>(std::max<std::int64_t>(window, 1));
  Groups all;
  for (std::size_t begin = 0; begin < order.size(); begin += step) {
    const Groups part = pack_best_fit(order.subspan(begin, std::min(step, order.size() - begin)),
                                      lengths, capacity);
    const auto base = static_cast<std::int64_t>(all.items.size());
    all.items.insert(all.items.end(), part.items.begin(), part.items.end());
    for (std::size_t g = 1; g < part.starts.size(); ++g)
      all.starts.push_back(base + part.starts[g]);
  }
  return all;
}

}  // namespace heddle::data
