#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

/// Geometry of tensors: the rectangles that somebody holds. Parameters, checkpoints
/// and the exchange of weights all compare such rectangles.
namespace heddle {

using Sizes = std::vector<std::int64_t>;

/// A rectangle of a tensor, with one offset and one size for each dimension.
struct Region {
  Sizes offset, size;

  std::int64_t numel() const;
  /// Whether it lies within a tensor of this shape.
  bool is_within(const Sizes& shape) const;
  bool operator==(const Region&) const = default;
};

/// All of a tensor.
Region whole_region(const Sizes& shape);

/// The rectangle that both hold; none if it is empty. The dimensions must be equally many.
std::optional<Region> intersect(const Region& a, const Region& b);

/// The parts of one tensor that one holder has, and where they lie in its memory.
struct Layout {
  /// The holder's memory from `local` on holds `global`.
  struct Part {
    Region global;
    Sizes local;
    bool operator==(const Part&) const = default;
  };
  Sizes global_shape;  ///< Shape of the whole tensor.
  Sizes local_shape;   ///< Shape of the holder's memory.
  std::vector<Part> parts;

  /// A holder of everything.
  static Layout whole(const Sizes& shape);
  bool operator==(const Layout&) const = default;
};

/// A rectangle that one holder has and another wants: equal elements lie at `from` and `to` in
/// their memories.
struct LayoutCopy {
  Sizes from, to, size;
  bool operator==(const LayoutCopy&) const = default;
};
/// The copies that bring everything of `to` that `from` holds. Throws InternalError for two
/// different global shapes.
std::vector<LayoutCopy> copies_between(const Layout& from, const Layout& to);

/// Counts who holds the elements of one tensor.
class Coverage {
 public:
  void add(const Region& region) { regions_.push_back(region); }
  /// Throws ModelError, naming `name` and a rectangle, unless each element is held exactly once.
  void check(const std::string& name, const Sizes& shape) const;

 private:
  std::vector<Region> regions_;
};

nlohmann::ordered_json to_json(const Layout& layout);
/// Throws InternalError for JSON that to_json did not write.
Layout layout_of(const nlohmann::ordered_json& json);

}  // namespace heddle
