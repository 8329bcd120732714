#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

/// An Ascend NPU that is not there: tensors of device `npu` in host memory, every operator computed
/// by libtorch on the CPU, and Ascend's known rules enforced (rules.h). For tests, never for work.
/// The process has one, as it would have one driver.
namespace heddle::device::sim {

inline constexpr const char* kVariable = "HEDDLE_SIM_NPU";
inline constexpr int kDevices = 8;
/// Unified buffer of one core, bytes.
inline constexpr std::int64_t kUnifiedBuffer = 192 * 1024;

struct Options {
  bool allow_float64 = false;  ///< Lifts the dtype rule, to prove equality with the CPU.
  bool has_fp8 = false;        ///< A chip of the 950 series.
};

/// Makes the device known to libtorch; no tensor can be made before start(). Nothing the second
/// time.
void install();
/// Installs and starts. Throws DeviceError (rule start-order) if it runs with other options, or is
/// finished: a platform starts once in a process.
void start(const Options& options = {});
/// After it no operator runs (rule lifetime). Tensors may still be freed.
void finish();
bool is_running();

/// Times the host has waited for the device since the start.
struct Waits {
  std::int64_t scalars = 0;  ///< item()
  std::int64_t copies = 0;   ///< Blocking copies to the host.
  std::int64_t shapes = 0;   ///< Operators whose output's shape depends on data (nonzero, equal).
  std::int64_t synchronize = 0;  ///< Of a device, stream or event.
  std::int64_t total() const { return scalars + copies + shapes + synchronize; }
};
Waits waits();

/// One operator run on the device, with the shapes of its tensors.
struct Call {
  std::string op;  ///< "aten::mm", "npu::npu_swiglu"
  std::vector<std::vector<std::int64_t>> sizes;
};

/// Keeps every call from its construction on, of all threads. One at a time.
class Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  std::vector<Call> calls() const;
};

}  // namespace heddle::device::sim
