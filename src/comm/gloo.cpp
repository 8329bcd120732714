// The only source that sees Gloo's headers. They are of 2022 (Debian's libgloo-dev), the library
// inside libtorch is newer: nothing of Gloo itself may be constructed or called here, only
// ProcessGroupGloo and its Options, which live in libtorch.
#include "comm/gloo.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/store_handle.h"

namespace heddle::comm {

c10::intrusive_ptr<c10d::Backend> make_gloo(const Store& store, std::int64_t rank,
                                            std::int64_t size, const std::string& address,
                                            Seconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(
      std::chrono::duration_cast<std::chrono::milliseconds>(timeout));
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store.handle().store, static_cast<int>(rank),
                                                     static_cast<int>(size), std::move(options));
}

}  // namespace heddle::comm
