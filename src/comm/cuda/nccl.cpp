// The only source that sees NCCL's header, of the version that this libtorch was built with.
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdlib>

#include "comm/device_backend.h"
#include "comm/store_handle.h"

namespace heddle::comm {
namespace {

// c10d takes these from the environment only. Its watchdog would end the process with a signal
// where comm::DeviceWatch reports an error that names operation and ranks. What the user set stays.
void quieten_watchdog() {
  for (const char* name : {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING",
                           "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_PROPAGATE_ERROR"})
    setenv(name, "0", /*overwrite=*/0);
}

}  // namespace

Backend make_nccl(const Store& store, const DeviceGroupOptions& options) {
  quieten_watchdog();
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout);
  nccl->group_name = options.name;
  const c10::DeviceGuard guard(options.device);
  auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(
      store.handle().store, static_cast<int>(options.rank), static_cast<int>(options.ranks.size()),
      std::move(nccl));
  group->eagerConnectSingleDevice(options.device);
  return group;
}

c10::intrusive_ptr<c10d::Work> nccl_without_results(const c10::intrusive_ptr<c10d::Work>& work) {
  using NcclWork = c10d::ProcessGroupNCCL::WorkNCCL;
  // Its copies are made for c10d's own watchdog, and leave the results out.
  return c10::make_intrusive<NcclWork>(dynamic_cast<const NcclWork&>(*work));
}

}  // namespace heddle::comm
