#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>
#include <string_view>

#include "base/log.h"
#include "device/backend.h"
#include "device/sim/driver.h"

/// Device `npu` of a build without CANN: refused, unless the user asks for the simulation.
namespace heddle::device::npu {
namespace {

std::optional<std::string> unavailable() {
  const char* value = std::getenv(sim::kVariable);
  if (value != nullptr && std::string_view(value) == "1") return std::nullopt;
  return fmt::format(
      "this build has no Ascend back end; rebuild on a machine with CANN: HEDDLE_TORCH_NPU_DIR=... "
      "cmake --preset npu && cmake --build --preset npu (docs/ascend.md), or set {}=1 for a slow "
      "simulation in host memory that checks a program against Ascend's rules",
      sim::kVariable);
}

std::vector<Accelerator> list() {
  Accelerator one;
  one.name = "SIMULATED Ascend NPU (host memory)";
  one.capability = "simulation";
  one.memory_bytes = std::int64_t{64} << 30;
  return std::vector<Accelerator>(sim::kDevices, one);
}

Memory memory(int index) {
  const auto stats = sim::allocator().getDeviceStats(static_cast<c10::DeviceIndex>(index));
  const auto& bytes = stats.allocated_bytes[0];
  Memory result;
  result.used_bytes = bytes.current;
  result.peak_bytes = bytes.peak;
  return result;
}

c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(sim::kType); }

void start(int index) {
  if (!sim::is_running()) {
    sim::start();
    log::warning(
        "SIMULATION: {}=1 makes device npu a simulated Ascend NPU in the memory of this host: it "
        "computes on the CPU, slowly, and refuses what hardware would punish; for tests only",
        sim::kVariable);
  }
  guard().setDevice(c10::Device(sim::kType, static_cast<c10::DeviceIndex>(index)));
}

}  // namespace

const Backend& backend() {
  static const Backend kSimulated = {
      .name = "npu",
      .unavailable = unavailable,
      .list = list,
      .on_chip_bytes = [](int) { return sim::kUnifiedBuffer; },
      .memory = memory,
      .synchronize =
          [](int index) { guard().synchronizeDevice(static_cast<c10::DeviceIndex>(index)); },
      .start = start,
      .finish =
          [] {
            if (sim::is_running()) sim::finish();
          }};
  return kSimulated;
}

}  // namespace heddle::device::npu
