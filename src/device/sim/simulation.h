#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
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
  /// A stream's writes stay hidden from other streams and the host until they wait for it.
  bool defers_streams = false;
  bool operator==(const Options&) const = default;
};
/// Reads the options in kVariable: "1" for a device as it is, or some of "float64", "fp8",
/// "deferred", separated by commas. None for any other text.
std::optional<Options> parse_options(std::string_view text);

/// Makes the device known to libtorch; no tensor can be made before start(). Nothing the second
/// time.
void install();
/// Installs and starts. Throws DeviceError (rule start-order) if it runs with other options, or is
/// finished: a platform starts once in a process.
void start(const Options& options = {});
/// After it no operator runs (rule lifetime). Tensors may still be freed.
void finish();
bool is_running();

using Counts = std::map<std::string, std::int64_t>;

/// How often the host has waited for the device since the start, by what it waited in:
/// "aten::_local_scalar_dense" (item()), "aten::_copy_from" (a blocking copy from or to the
/// host), "synchronize", or an operator whose result's shape depends on data ("aten::nonzero").
Counts waits();
/// Waits since `before`.
Counts waits_since(const Counts& before);

/// How often each entry point of torch_npu and ACL was stood in for, by the name under which
/// device/npu and comm/npu call it: "torch_npu::init_npu", "NPUGraph::replay".
Counts entry_calls();

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
