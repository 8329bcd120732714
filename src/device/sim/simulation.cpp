#include "device/sim/simulation.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <mutex>

#include "base/text.h"
#include "device/sim/capture.h"
#include "device/sim/driver.h"
#include "device/sim/rules.h"

namespace heddle::device::sim {

Driver& driver() {
  static auto* const made = new Driver;  // never destroyed: tensors may outlive static objects
  return *made;
}

std::optional<Options> parse_options(std::string_view text) {
  Options options;
  if (text == "1") return options;
  for (const std::string& word : text::split(std::string(text), ',')) {
    if (word == "float64") {
      options.allow_float64 = true;
    } else if (word == "fp8") {
      options.has_fp8 = true;
    } else if (word == "deferred") {
      options.defers_streams = true;
    } else {
      return std::nullopt;
    }
  }
  return options;
}

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::register_privateuse1_backend("npu");
    c10::SetAllocator(kType, &allocator());
    install_guard();
    install_hooks();
    install_fallback();
    install_factories();
    install_copies();
    install_operators();
  });
}

void start(const Options& options) {
  install();
  Driver& d = driver();
  const auto phase = d.phase.load();
  if (phase == Driver::Phase::kFinished) {
    refuse(Rule::kStartOrder, "the platform was finished; it starts once in a process");
  }
  if (phase == Driver::Phase::kRunning) {
    if (options != d.options)
      refuse(Rule::kStartOrder, "the platform runs already, with other options");
    return;
  }
  count_entry("torch_npu::init_npu");
  d.options = options;
  d.phase = Driver::Phase::kRunning;
}

void finish() {
  count_entry("torch_npu::finalize_npu");
  driver().phase = Driver::Phase::kFinished;
}

bool is_running() { return driver().phase == Driver::Phase::kRunning; }

void require_running(const char* what) {
  const auto phase = driver().phase.load();
  if (phase == Driver::Phase::kRunning) return;
  refuse(Rule::kLifetime, "{} {} the platform", what,
         phase == Driver::Phase::kInstalled ? "before the start of" : "after the end of");
}

void require_dtype(c10::ScalarType dtype) {
  const Options& options = driver().options;
  if ((dtype == c10::kDouble || dtype == c10::kComplexDouble) && !options.allow_float64)
    refuse(Rule::kDtype, "{} is not available on the device", c10::toString(dtype));
  if (c10::isFloat8Type(dtype) && !options.has_fp8)
    refuse(Rule::kDtype, "{} is not available on this chip", c10::toString(dtype));
}

void record_call(const std::string& op, const std::vector<at::Tensor>& tensors) {
  Call call{op, {}};
  for (const at::Tensor& tensor : tensors) call.sizes.push_back(tensor.sizes().vec());
  Driver& d = driver();
  const std::scoped_lock lock(d.mutex);
  d.calls.push_back(std::move(call));
}

void wait(const std::string& what) {
  if (Capture::current() != nullptr) {
    refuse(Rule::kCapture,
           "{} waits for the device while a graph is recorded; what is recorded has not run", what);
  }
  Driver& d = driver();
  const std::scoped_lock lock(d.mutex);
  ++d.waits[what];
}

void count_entry(const char* entry) {
  Driver& d = driver();
  const std::scoped_lock lock(d.mutex);
  ++d.entries[entry];
}

Counts entry_calls() {
  Driver& d = driver();
  const std::scoped_lock lock(d.mutex);
  return d.entries;
}

Counts waits() {
  Driver& d = driver();
  const std::scoped_lock lock(d.mutex);
  return d.waits;
}

Counts waits_since(const Counts& before) {
  Counts since = waits();
  for (const auto& [what, count] : before) {
    if ((since[what] -= count) == 0) since.erase(what);
  }
  return since;
}

Recording::Recording() {
  Driver& d = driver();
  const std::scoped_lock lock(d.mutex);
  d.calls.clear();
  d.is_recording = true;
}

Recording::~Recording() { driver().is_recording = false; }

std::vector<Call> Recording::calls() const {
  Driver& d = driver();
  const std::scoped_lock lock(d.mutex);
  return d.calls;
}

}  // namespace heddle::device::sim
