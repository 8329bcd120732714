#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>
#include <string_view>

#include "base/log.h"
#include "device/backend.h"
#include "device/npu_chip.h"
#include "device/sim/driver.h"
#include "device/sim/graph.h"
#include "device/sim/rules.h"

/// Device `npu` of a build without CANN: refused, unless the user asks for the simulation.
namespace heddle::device::npu {
namespace {

std::optional<std::string> unavailable() {
  sim::count_entry("c10_npu::device_count");
  const char* const value = std::getenv(sim::kVariable);
  if (value != nullptr && sim::parse_options(value)) return std::nullopt;
  if (value != nullptr && std::string_view(value) != "0" && *value != '\0') {
    return fmt::format(
        "{} is '{}': expected 1, or some of float64, fp8 and deferred, separated by commas",
        sim::kVariable, value);
  }
  return fmt::format(
      "this build has no Ascend back end; rebuild on a machine with CANN: HEDDLE_TORCH_NPU_DIR=... "
      "cmake --preset npu && cmake --build --preset npu (docs/ascend.md), or set {}=1 for a slow "
      "simulation in host memory that checks a program against Ascend's rules",
      sim::kVariable);
}

constexpr std::int64_t kMemoryBytes = std::int64_t{64} << 30;

std::vector<Accelerator> list() {
  for (const char* entry : {"aclrtGetSocName", "GetCANNVersion", "aclrtGetMemInfo"})
    sim::count_entry(entry);
  Accelerator one;
  one.name = "SIMULATED Ascend NPU (host memory)";
  one.capability = "simulation";
  one.memory_bytes = kMemoryBytes;
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

std::int64_t free_bytes(int index) {
  sim::count_entry("aclrtGetMemInfo");
  return kMemoryBytes - memory(index).used_bytes;
}

Platform platform() {
  sim::count_entry("GetCANNVersion");
  Platform result;
  result.parts = {{"chip", "simulated, of no family"},
                  {"driver", "none: simulated"},
                  {"CANN", "none: simulated"},
                  {"HCCL", "its shape over Gloo"},
                  {"torch_npu", fmt::format("schemas of {}", NpuVersions{}.torch_npu)}};
  return result;
}

void require_started(const char* what) {
  if (sim::is_running()) return;
  sim::refuse(sim::Rule::kStartOrder,
              "{} is made before the platform is started; call device::start() first", what);
}

void require_on_chip(const char* what, std::int64_t bytes) {
  if (bytes <= sim::kUnifiedBuffer) return;
  sim::refuse(sim::Rule::kTile, "{}: a tile of {} bytes; a core's unified buffer has {}", what,
              bytes, sim::kUnifiedBuffer);
}

c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(sim::kType); }

void start(int index) {
  if (!sim::is_running()) {
    const char* const value = std::getenv(sim::kVariable);
    const auto options = sim::parse_options(value == nullptr ? "1" : value);
    sim::start(options.value_or(sim::Options()));
    log::warning(
        "SIMULATION: {} makes device npu a simulated Ascend NPU in the memory of this host: it "
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
      .free_bytes = free_bytes,
      .synchronize =
          [](int index) { guard().synchronizeDevice(static_cast<c10::DeviceIndex>(index)); },
      .start = start,
      .finish =
          [] {
            if (sim::is_running()) sim::finish();
          },
      .platform = platform,
      .record = sim::record,
      .require_started = require_started,
      .require_on_chip = require_on_chip,
      .has_float64 = [] { return sim::driver().options.allow_float64; },
      .is_simulated = true};
  return kSimulated;
}

}  // namespace heddle::device::npu
