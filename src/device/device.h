#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

namespace heddle::device {

/// "cpu", "cuda", "cuda:1", "npu:0". Throws ConfigError for other text and DeviceError when this
/// build or machine has no such device, saying what to rebuild with or install.
c10::Device parse(const std::string& text);

/// Starts the platform of the device, if it needs that, and makes it the current device of this
/// thread: before its first tensor, before a model is built. Throws DeviceError.
void start(c10::Device device);

/// Ends what start() began in this process; after the last tensor and process group. Does not
/// throw.
void finish() noexcept;

/// Waits until all work queued on the device is done. Nothing to do on the CPU.
void synchronize(c10::Device device);

struct Memory {
  std::int64_t used_bytes = 0;  ///< Held by tensors now (CPU: resident set of the process).
  std::int64_t peak_bytes =
      0;  ///< Highest since the start or the last reset (CPU: highest resident set).
  std::int64_t total_bytes = 0;  ///< Memory of the device, or of the machine or its cgroup.
};
Memory memory(c10::Device device);

/// Whether the device is simulated in the memory of the host.
bool is_simulated(c10::Device device);

/// Bytes that tensors of this process may take besides what they hold: memory that nobody has, and
/// what their allocator keeps for reuse.
std::int64_t free_bytes(c10::Device device);

struct Properties {
  std::string name;  ///< "NVIDIA H200", "AMD EPYC (2 cores)".
  std::int64_t on_chip_bytes =
      0;  ///< Shared memory per block or unified buffer; 0 if it limits nothing.
};
Properties properties(c10::Device device);

/// Operations a second of dense matrix products with elements of `dtype_bits` (16, 32 or 64); 0 if
/// unknown, as on a CPU that is busy with something else. On the CPU it is what products reach now:
/// the call takes about 30 ms.
double peak_flops(c10::Device device, int dtype_bits);

/// Whether libtorch and cuDNN must add in an order that is the same on every run; before start().
/// Operators for which they have no such kernel say so in a warning. Our own kernels always do.
void set_deterministic(bool deterministic);

/// Threads of one tensor kernel on the CPU; 0 leaves the cores this process may run on.
void set_cpu_threads(int threads);

struct Accelerator {
  std::string name;
  std::int64_t memory_bytes = 0;
  std::string capability;  ///< "sm_90", "Ascend910B3"
  std::string device;      ///< "cuda:0", "npu:0"
};
/// Versions of the software below an accelerator, and which of them do not fit together.
struct Platform {
  std::vector<std::pair<std::string, std::string>> parts;  ///< "CANN", "9.1.0"
  std::vector<std::string> mismatches;                     ///< Sentences with both versions.
};
/// Platform of the accelerators' back end; empty where it has nothing to say.
Platform platform();

/// Devices that the drivers show; empty in a build without a back end. `why_none` then says why.
std::vector<Accelerator> accelerators(std::string& why_none);

}  // namespace heddle::device
