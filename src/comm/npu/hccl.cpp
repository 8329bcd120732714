// The only source that sees HCCL's process group. Everything in it runs on the thread that owns the
// device (comm/connection.cpp sees to that), and one group is made of one set of ranks, then
// reused.
#include "comm/device_backend.h"

#include <torch_npu/csrc/distributed/ProcessGroupHCCL.hpp>

#include <algorithm>
#include <cstdlib>

#include "base/errors.h"
#include "comm/store_handle.h"
#include "device/npu_error.h"

namespace heddle::comm {

Backend make_hccl(const Store& store, const DeviceGroupOptions& options) {
  // Read by HCCL when its first communicator is made. What the user has set stands.
  for (const auto& [name, value] : hccl_port_variables(options.master_port))
    setenv(name.c_str(), value.c_str(), /*overwrite=*/0);
  using c10d_npu::ProcessGroupHCCL;
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout);
  // create() drops the timeout it is given.
  auto hccl = ProcessGroupHCCL::Options::create(/*_is_high_priority_stream=*/false);
  hccl->timeout = timeout;
  hccl->opTimeout = timeout;
  std::transform(options.ranks.begin(), options.ranks.end(),
                 std::back_inserter(hccl->global_ranks_in_group),
                 [](std::int64_t rank) { return static_cast<std::uint32_t>(rank); });
  hccl->group_id = options.name;
  try {
    return c10::make_intrusive<ProcessGroupHCCL>(store.handle().store,
                                                 static_cast<int>(options.rank),
                                                 static_cast<int>(options.ranks.size()), hccl);
  } catch (const std::exception& error) {
    throw_error<CommError>("make group {} of HCCL: {}", options.name,
                           device::explain_npu_error(error.what()).value_or(error.what()));
  }
}

c10::intrusive_ptr<c10d::Work> hccl_without_results(const c10::intrusive_ptr<c10d::Work>& work) {
  using HcclWork = c10d_npu::ProcessGroupHCCL::WorkHCCL;
  // Its copies are made for torch_npu's own watchdog, and leave the results out.
  return c10::make_intrusive<HcclWork>(dynamic_cast<const HcclWork&>(*work));
}

}  // namespace heddle::comm
