// The sources of this folder alone see torch_npu and ACL (comm/npu: HCCL). Work itself goes through
// libtorch's dispatcher; streams and events are c10::Stream and c10::Event, which torch_npu's guard
// serves. init_npu and finalize_npu exist in a libtorch_npu built with BUILD_LIBTORCH only.
#include <string>  // which GetCANNInfo.h needs and does not include

#include <acl/acl.h>
#include <torch/headeronly/version.h>
#include <torch_npu/csrc/core/npu/GetCANNInfo.h>
#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>
#include <torch_npu/csrc/core/npu/NPUFunctions.h>
#include <torch_npu/csrc/libs/init_npu.h>

#include <cstdlib>
#include <utility>

#include <fmt/format.h>

#include "base/errors.h"
#include "base/log.h"
#include "device/backend.h"
#include "device/npu/graph.h"
#include "device/npu/translated.h"
#include "device/npu_chip.h"

namespace heddle::device::npu {
namespace {

/// Segments that grow instead of blocks of fixed size: packed batches of changing length otherwise
/// leave memory that fits nothing. The user's own setting stands.
constexpr const char* kAllocatorVariable = "PYTORCH_NPU_ALLOC_CONF";
constexpr const char* kAllocatorSettings = "expandable_segments:True";

std::string soc_name() {
  const char* name = aclrtGetSocName();
  return name == nullptr ? "unknown" : name;
}

std::optional<std::string> unavailable() {
  if (c10_npu::device_count() > 0) return std::nullopt;
  return "the Ascend driver shows no device; does npu-smi info list one, and is CANN's set_env.sh "
         "sourced?";
}

struct DeviceMemory {
  std::size_t free = 0, total = 0;
};

/// Memory of the current device; all devices of a host are alike.
DeviceMemory device_memory() {
  DeviceMemory memory;
  if (aclrtGetMemInfo(ACL_HBM_MEM, &memory.free, &memory.total) != ACL_SUCCESS) return {};
  return memory;
}

std::vector<Accelerator> list() {
  Accelerator one;
  one.name = soc_name();
  const auto chip = npu_chip(one.name);
  one.capability =
      fmt::format("{}, CANN {}", chip ? chip->family : "unknown chip", GetCANNVersion("CANN"));
  one.memory_bytes = static_cast<std::int64_t>(device_memory().total);
  return std::vector<Accelerator>(static_cast<std::size_t>(c10_npu::device_count()), one);
}

constexpr auto kAll = static_cast<std::size_t>(c10_npu::NPUCachingAllocator::StatType::AGGREGATE);

auto stats_of(int index) {
  return translated("memory statistics",
                    [&] { return c10_npu::NPUCachingAllocator::get()->getDeviceStats(index); });
}

Memory memory(int index) {
  const auto stats = stats_of(index);
  const auto& bytes = stats.allocated_bytes[kAll];
  Memory result;
  result.used_bytes = bytes.current;
  result.peak_bytes = bytes.peak;
  return result;
}

std::int64_t free_bytes(int index) {
  const auto stats = stats_of(index);
  return static_cast<std::int64_t>(device_memory().free) + stats.reserved_bytes[kAll].current -
         stats.allocated_bytes[kAll].current;
}

void synchronize(int index) {
  translated("synchronize", [&] {
    c10_npu::set_device(static_cast<c10::DeviceIndex>(index));
    c10_npu::device_synchronize();
  });
}

Platform platform() {
  const std::string soc = soc_name();
  const auto chip = npu_chip(soc);
  Platform result;
  result.parts = {{"chip", fmt::format("{} ({})", soc, chip ? chip->family : "unknown")},
                  {"driver", GetCANNVersion("DRIVER")},
                  {"CANN", GetCANNVersion("CANN")},
                  {"HCCL", GetCANNVersion("HCCL")},
                  {"torch_npu", fmt::format("headers of {}", NpuVersions{}.torch_npu)}};
  result.mismatches = npu_mismatches(soc, GetCANNVersion("CANN"), TORCH_VERSION);
  return result;
}

/// -1 before start(), -2 after finish(). One process has one device: torch_npu itself is global.
int& started_device() {
  static int index = -1;
  return index;
}

void start(int index) {
  int& started = started_device();
  if (started == index) {
    c10_npu::set_device(static_cast<c10::DeviceIndex>(index));
    return;
  }
  if (started != -1) {
    throw_error<DeviceError>("npu:{}: {}", index,
                             started == -2
                                 ? std::string("the platform was ended and starts once per process")
                                 : fmt::format("this process has started npu:{} already", started));
  }
  setenv(kAllocatorVariable, kAllocatorSettings, /*overwrite=*/0);
  translated("start the NPU", [&] {
    torch_npu::init_npu(fmt::format("npu:{}", index));
    c10_npu::set_device(static_cast<c10::DeviceIndex>(index));
  });
  started = index;
  for (const std::string& mismatch : platform().mismatches)
    log::warning("npu:{}: {}", index, mismatch);
}

void require_started(const char* what) {
  if (started_device() >= 0) return;
  throw_error<DeviceError>("{} is made before the platform of the NPU is started", what);
}

void require_on_chip(const char* what, std::int64_t bytes) {
  if (bytes <= kUnifiedBufferBytes) return;
  throw_error<DeviceError>("{}: a tile of {} bytes; a core's unified buffer has {}", what, bytes,
                           kUnifiedBufferBytes);
}

void finish() {
  if (started_device() < 0) return;
  started_device() = -2;
  translated("end the NPU", [] {
    c10_npu::device_synchronize();
    torch_npu::finalize_npu();
  });
}

}  // namespace

const Backend& backend() {
  static const Backend kNpu = {.name = "npu",
                               .unavailable = unavailable,
                               .list = list,
                               .on_chip_bytes = [](int) { return kUnifiedBufferBytes; },
                               .memory = memory,
                               .free_bytes = free_bytes,
                               .synchronize = synchronize,
                               .start = start,
                               .finish = finish,
                               .platform = platform,
                               .record = record,
                               .require_started = require_started,
                               .require_on_chip = require_on_chip,
                               .has_float64 = [] { return false; }};
  return kNpu;
}

}  // namespace heddle::device::npu
