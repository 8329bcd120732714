#pragma once

#include <cstdint>

namespace heddle::ops {

/// Where in a model the linear layers stand that a thread computes. Kernels of a type narrower than
/// the model's leave some places to wider ones.
struct LinearPlace {
  static constexpr std::int64_t kOutside = -1;
  std::int64_t block = kOutside;  ///< Index of the block among those of the whole model.
  bool is_router = false;         ///< A mixture's: its outputs choose experts.
};

/// The place where this thread computes.
const LinearPlace& linear_place();

/// Sets it for as long as it lives. A backward runs later, perhaps on another thread: whoever hangs
/// one on a tensor keeps the place for it.
class AtLinearPlace {
 public:
  explicit AtLinearPlace(const LinearPlace& place);
  ~AtLinearPlace();
  AtLinearPlace(const AtLinearPlace&) = delete;
  AtLinearPlace& operator=(const AtLinearPlace&) = delete;

 private:
  LinearPlace before_;
};

}  // namespace heddle::ops
