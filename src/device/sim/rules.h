#pragma once

#include <string>

#include <fmt/format.h>

#include "base/errors.h"

/// Uses that Ascend hardware is known to punish with a crash, a hang or a wrong number. The
/// simulated NPU refuses each at once, by name.
namespace heddle::device::sim {

enum class Rule {
  kHostAccess,    ///< A device tensor is read on the host without a copy.
  kMixedDevices,  ///< A tensor of the host among the arguments of a device operator.
  kLifetime,      ///< Use before the platform is started, or after it is finished.
  kStartOrder,    ///< The platform started after a model, a second time or with other options.
  kStreamOrder,   ///< Memory changed or freed that another stream may still read.
  kCapture,       ///< A wait for the device, or a collective, while a graph is recorded.
  kTile,          ///< A tile that is larger than the unified buffer.
  kDtype,         ///< float64 anywhere, fp8 on a chip that has none.
  kDenseMask,     ///< A mask of the attention scores' size.
  kMaskShape,     ///< A compressed mask of another shape, dtype or polarity.
  kLengths,       ///< Lengths of packed sequences that are not cumulative host integers.
  kExperts,       ///< More than 128 experts on one rank.
  kGdnLimits,     ///< The native gated delta rule outside its documented limits.
  kPayload,       ///< Bytes or objects over the device group.
  kThread,        ///< A collective from a thread that does not own the device.
  kReuse,         ///< A communicator made twice for one group.
  kBoundGroup,    ///< A group made while a default group is bound to a device.
};
/// "host-access", as messages and the tests name it.
const char* name(Rule rule);

/// "simulated NPU, rule host-access: ..."
std::string broken(Rule rule, const std::string& what);

template <class E = DeviceError, class... Args>
[[noreturn]] void refuse(Rule rule, fmt::format_string<Args...> format, Args&&... args) {
  throw E(broken(rule, fmt::format(format, std::forward<Args>(args)...)));
}

}  // namespace heddle::device::sim
