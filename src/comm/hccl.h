#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "comm/store.h"

namespace c10d {
class Backend;
}

namespace heddle::comm {

struct HcclOptions {
  std::string name;                 ///< Of the group, for messages.
  std::vector<std::int64_t> ranks;  ///< Of the world, in the order of their places.
  std::int64_t rank = 0;            ///< This one's place.
  std::uint16_t master_port = 0;    ///< Of the rendezvous: HCCL's own ports derive from it.
  Seconds timeout{0};               ///< Of every operation.
};

/// An HCCL process group for tensors of an NPU, whose members meet in `store` (its keys are this
/// group's alone). Call it from the thread that owns the device; HCCL itself connects with the
/// first operation. A build without the Ascend back end throws CommError that says what to rebuild
/// with.
c10::intrusive_ptr<c10d::Backend> make_hccl(const Store& store, const HcclOptions& options);

/// The variables that keep HCCL's listening sockets of two jobs on one host apart, derived from the
/// port of their rendezvous: a hundred ports of its own for each of 400 neighbouring master ports,
/// half for the host, half for the devices, none of them the master port.
std::vector<std::pair<std::string, std::string>> hccl_port_variables(std::uint16_t master_port);

}  // namespace heddle::comm
