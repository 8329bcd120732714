#include "device/device.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <utility>

#include <fmt/ranges.h>

#include "base/errors.h"
#include "base/host_memory.h"
#include "base/log.h"
#include "base/threads.h"
#include "device/backend.h"
#include "device/require.h"

namespace heddle::device {
namespace {

std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "CPU";
}

/// CPU time of all threads of this process.
double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// Operations a second of one product of matrices of ones.
struct TimedProduct {
  double seconds = 0;
  double flops = 0;  ///< 0 where threads shared their cores with other processes.

  TimedProduct(std::int64_t size, c10::ScalarType dtype) {
    constexpr double kAlone = 0.9;
    const at::Tensor a = at::ones({size, size}, dtype), b = at::ones({size, size}, dtype);
    const double cpu_start = cpu_seconds();
    const auto start = std::chrono::steady_clock::now();
    const at::Tensor c = at::mm(a, b);
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const double busy = (cpu_seconds() - cpu_start) / (seconds * at::get_num_threads());
    const auto n = static_cast<double>(size);
    if (busy > kAlone) flops = 2 * n * n * n / seconds;
  }
};

double measured_gemm_flops(c10::ScalarType dtype) {
  // Large enough for all threads, and no larger: a run of a few steps waits for it.
  constexpr double kLong = 4e-3;
  constexpr std::int64_t kLargest = 2048;
  std::int64_t size = 256;
  while (size < kLargest && TimedProduct(size, dtype).seconds < kLong) size *= 2;
  double best = 0;
  for (int repeat = 0; repeat < 3; ++repeat) best = std::max(best, TimedProduct(size, dtype).flops);
  return best;
}

// Dense matrix rates of the vendors' data sheets, TFLOP/s in bf16 and in fp32 (TF32 off).
double accelerator_flops(const std::string& name, int dtype_bits) {
  struct Row {
    const char* name;
    double bf16, fp32;
  };
  constexpr std::array<Row, 7> kRows = {{{"H200", 989, 67},
                                         {"H100", 989, 67},
                                         {"B200", 2250, 75},
                                         {"A100", 312, 19.5},
                                         {"L40S", 362, 91.6},
                                         {"RTX 4090", 165, 82.6},
                                         {"A10", 125, 31.2}}};
  for (const Row& row : kRows) {
    if (name.find(row.name) != std::string::npos)
      return (dtype_bits == 16 ? row.bf16 : row.fp32) * 1e12;
  }
  return 0;
}

constexpr std::array kBackends = {cuda::backend, npu::backend};

const Backend& backend_of(c10::Device device) {
  return device.is_cuda() ? cuda::backend() : npu::backend();
}

Accelerator accelerator(c10::Device device) {
  return backend_of(device).list().at(static_cast<std::size_t>(device.index()));
}

}  // namespace

c10::Device parse(const std::string& text) {
  // "npu" is what libtorch calls PrivateUse1 only after its back end has started.
  const bool is_npu = text == "npu" || text.starts_with("npu:");
  std::optional<c10::Device> device;
  try {
    device.emplace(is_npu ? "privateuseone" + text.substr(3) : text);
  } catch (const c10::Error&) {
  }
  if (device && device->is_cpu()) return c10::Device(c10::DeviceType::CPU);
  if (!device || (!is_npu && !device->is_cuda())) {
    throw_error<ConfigError>("device '{}': expected cpu, cuda, cuda:N, npu or npu:N", text);
  }
  const Backend& backend = backend_of(*device);
  if (const auto reason = backend.unavailable())
    throw_error<ConfigError>("device '{}': {}", text, *reason);
  const int index = device->has_index() ? device->index() : 0;
  const auto count = static_cast<int>(backend.list().size());
  if (index >= count) {
    throw_error<ConfigError>("device '{}': the machine has {} {} device(s)", text, count,
                             backend.name);
  }
  return c10::Device(device->type(), static_cast<c10::DeviceIndex>(index));
}

void start(c10::Device device) {
  if (device.is_cpu()) return;
  if (const auto start = backend_of(device).start) start(device.index());
}

void finish() noexcept {
  for (const auto backend : kBackends) {
    if (backend().finish == nullptr) continue;
    try {
      backend().finish();
    } catch (const std::exception& error) {
      log::warning("{}: {}", backend().name, error.what());
    }
  }
}

bool is_simulated(c10::Device device) {
  return !device.is_cpu() && !device.is_meta() && backend_of(device).is_simulated;
}

void synchronize(c10::Device device) {
  if (!device.is_cpu()) backend_of(device).synchronize(device.index());
}

std::unique_ptr<Graph> record(c10::Device device, const std::function<void()>& work,
                              const Graph* neighbour) {
  if (device.is_cpu() || backend_of(device).record == nullptr) {
    throw_error<DeviceError>("this build records no graphs on {}",
                             device.is_cpu() ? "cpu" : backend_of(device).name);
  }
  return backend_of(device).record(device.index(), work, neighbour);
}

void require_started(c10::Device device, const char* what) {
  if (device.is_cpu() || device.is_meta()) return;
  if (const auto require = backend_of(device).require_started) require(what);
}

void require_dtype(c10::Device device, c10::ScalarType dtype, const char* key) {
  if (device.is_cpu() || device.is_meta() || dtype != c10::ScalarType::Double) return;
  const Backend& backend = backend_of(device);
  if (backend.has_float64 == nullptr || backend.has_float64()) return;
  throw_error<ConfigError>("{}: float64 is not available on device {}", key, backend.name);
}

void require_on_chip(c10::Device device, const char* what, std::int64_t bytes) {
  if (device.is_cpu() || device.is_meta()) return;
  if (const auto require = backend_of(device).require_on_chip) require(what, bytes);
}

Memory memory(c10::Device device) {
  Memory result;
  if (device.is_cpu()) {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    result.used_bytes = resident_bytes();
    result.peak_bytes = static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
    result.total_bytes = host_memory().total;
    return result;
  }
  result = backend_of(device).memory(device.index());
  result.total_bytes = accelerator(device).memory_bytes;
  return result;
}

std::int64_t free_bytes(c10::Device device) {
  return device.is_cpu() ? host_memory().available : backend_of(device).free_bytes(device.index());
}

Properties properties(c10::Device device) {
  if (device.is_cpu()) return {fmt::format("{} ({} cores)", cpu_name(), available_cores())};
  return {accelerator(device).name, backend_of(device).on_chip_bytes(device.index())};
}

double peak_flops(c10::Device device, int dtype_bits) {
  if (!device.is_cpu()) return accelerator_flops(accelerator(device).name, dtype_bits);
  return measured_gemm_flops(dtype_bits == 64   ? c10::kDouble
                             : dtype_bits == 16 ? c10::kBFloat16
                                                : c10::kFloat);
}

void set_deterministic(bool deterministic) {
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(deterministic, /*warn_only=*/true);
  context.setDeterministicCuDNN(deterministic);
  // Memory is written before it is read with and without it.
  context.setDeterministicFillUninitializedMemory(false);
  // cuBLAS divides its scratch among streams otherwise; read when its first handle is made.
  if (deterministic) setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
}

void set_cpu_threads(int threads) {
  at::set_num_threads(threads > 0 ? threads : available_cores());
}

Platform platform() {
  Platform all;
  for (const auto backend : kBackends) {
    if (backend().platform == nullptr || backend().unavailable()) continue;
    Platform one = backend().platform();
    std::move(one.parts.begin(), one.parts.end(), std::back_inserter(all.parts));
    std::move(one.mismatches.begin(), one.mismatches.end(), std::back_inserter(all.mismatches));
  }
  return all;
}

std::vector<Accelerator> accelerators(std::string& why_none) {
  std::vector<Accelerator> found;
  std::vector<std::string> reasons;
  for (const auto backend : kBackends) {
    if (const auto reason = backend().unavailable()) {
      reasons.push_back(*reason);
      continue;
    }
    int index = 0;
    for (Accelerator& one : backend().list()) {
      one.device = fmt::format("{}:{}", backend().name, index++);
      found.push_back(std::move(one));
    }
  }
  if (found.empty()) why_none = fmt::format("{}", fmt::join(reasons, "; "));
  return found;
}

}  // namespace heddle::device
