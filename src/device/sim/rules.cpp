#include "device/sim/rules.h"

namespace heddle::device::sim {

const char* name(Rule rule) {
  switch (rule) {
    case Rule::kHostAccess:
      return "host-access";
    case Rule::kMixedDevices:
      return "mixed-devices";
    case Rule::kLifetime:
      return "lifetime";
    case Rule::kStartOrder:
      return "start-order";
    case Rule::kStreamOrder:
      return "stream-order";
    case Rule::kCapture:
      return "capture";
    case Rule::kTile:
      return "tile";
    case Rule::kDtype:
      return "dtype";
    case Rule::kDenseMask:
      return "dense-mask";
    case Rule::kMaskShape:
      return "mask-shape";
    case Rule::kLengths:
      return "lengths";
    case Rule::kExperts:
      return "experts";
    case Rule::kGdnLimits:
      return "gdn-limits";
    case Rule::kPayload:
      return "payload";
    case Rule::kThread:
      return "thread";
    case Rule::kReuse:
      return "reuse";
    case Rule::kBoundGroup:
      return "bound-group";
  }
  return "?";
}

std::string broken(Rule rule, const std::string& what) {
  return fmt::format("simulated NPU, rule {}: {}", name(rule), what);
}

}  // namespace heddle::device::sim
