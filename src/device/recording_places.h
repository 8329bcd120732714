#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

namespace heddle::device {

/// Chooses the shapes of some work that have a recording, where there is room for so many of them.
/// To record takes longer than to launch, so a shape gets a place only if it came before. With all
/// places taken it must have come oftener of late than the shape that it displaces: where more
/// shapes take turns than there are places, some stay recorded and the others are launched.
class RecordingPlaces {
 public:
  /// Numbers that the launches of the work depend on.
  using Shape = std::vector<std::int64_t>;

  explicit RecordingPlaces(std::size_t places) : places_(places) {}

  /// Before each run of the work, recorded or not.
  void meet(Shape shape);
  struct Verdict {
    bool is_recorded = false;            ///< The work is to be recorded now.
    std::optional<std::size_t> instead;  ///< Index of the recording that goes first.
  };
  /// Judges a shape that was just met and has no recording; `recorded` are the shapes that have
  /// one.
  Verdict judge(const Shape& shape, std::span<const Shape> recorded) const;

 private:
  std::int64_t count(const Shape& shape) const;

  std::size_t places_;
  std::deque<Shape> met_;  ///< The last ones; oldest first.
};

}  // namespace heddle::device
