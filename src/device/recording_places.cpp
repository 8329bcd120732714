#include "device/recording_places.h"

#include <algorithm>
#include <utility>

namespace heddle::device {
namespace {

constexpr std::size_t kRemembered = 256;
/// A recording costs about as much as so many launches save.
constexpr std::int64_t kAhead = 2;

}  // namespace

void RecordingPlaces::meet(Shape shape) {
  met_.push_back(std::move(shape));
  if (met_.size() > kRemembered) met_.pop_front();
}

RecordingPlaces::Verdict RecordingPlaces::judge(const Shape& shape,
                                                std::span<const Shape> recorded) const {
  const std::int64_t own = count(shape);
  if (own < 2) return {};
  if (recorded.size() < places_) return {.is_recorded = true, .instead = {}};
  std::vector<std::int64_t> counts(recorded.size());
  std::ranges::transform(recorded, counts.begin(),
                         [&](const Shape& other) { return count(other); });
  const auto least = std::ranges::min_element(counts);
  if (own < *least + kAhead) return {};
  return {.is_recorded = true, .instead = static_cast<std::size_t>(least - counts.begin())};
}

std::int64_t RecordingPlaces::count(const Shape& shape) const {
  return std::ranges::count(met_, shape);
}

}  // namespace heddle::device
