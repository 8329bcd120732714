#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "comm/store.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

/// Process groups for tensors of a device. comm/<vendor>/ defines each in a build that has the
/// vendor's library; comm/stub/ in any other, where it throws CommError that says what to rebuild
/// with.
namespace heddle::comm {

using Backend = c10::intrusive_ptr<c10d::Backend>;

struct DeviceGroupOptions {
  std::string name;                          ///< Name of the group, for messages.
  std::vector<std::int64_t> ranks;           ///< Ranks of the world, in the order of their places.
  std::int64_t rank = 0;                     ///< This one's place.
  c10::Device device{c10::DeviceType::CPU};  ///< This rank's.
  std::uint16_t master_port = 0;  ///< Port of the rendezvous: HCCL's own ports derive from it.
  Seconds timeout{0};             ///< Deadline of every operation.
};

/// NCCL among the members, who meet in `store` (its keys are this group's alone). Blocks until all
/// are connected; throws what c10d throws when they are not within the timeout. Nothing of it ends
/// the process: see DeviceWatch.
Backend make_nccl(const Store& store, const DeviceGroupOptions& options);

/// HCCL likewise. Called by the thread that owns the device; HCCL connects with the first
/// operation.
Backend make_hccl(const Store& store, const DeviceGroupOptions& options);

/// A handle of the same operation that says how it ends and does not keep the tensors it writes:
/// `work` keeps those as long as it lives, which a watch on it must not prolong.
c10::intrusive_ptr<c10d::Work> nccl_without_results(const c10::intrusive_ptr<c10d::Work>& work);
c10::intrusive_ptr<c10d::Work> hccl_without_results(const c10::intrusive_ptr<c10d::Work>& work);

/// The variables that keep HCCL's listening sockets of two jobs on one host apart, derived from the
/// port of their rendezvous: a hundred ports of its own for each of 400 neighbouring master ports,
/// half for the host, half for the devices, none of them the master port.
std::vector<std::pair<std::string, std::string>> hccl_port_variables(std::uint16_t master_port);

}  // namespace heddle::comm
