#include "device/device.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <utility>

#include "base/errors.h"
#include "base/threads.h"
#include "device/backend.h"

namespace heddle::device {
namespace {

std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::int64_t host_memory_bytes() {
  std::int64_t bytes = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  std::ifstream limit("/sys/fs/cgroup/memory.max");
  std::int64_t cgroup = 0;
  if (limit >> cgroup && cgroup > 0) bytes = std::min(bytes, cgroup);
  return bytes;
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "CPU";
}

double measured_gemm_flops(c10::ScalarType dtype) {
  constexpr std::int64_t kSize = 1024;
  const at::Tensor a = at::ones({kSize, kSize}, dtype), b = at::ones({kSize, kSize}, dtype);
  double best = 0;
  for (int repeat = 0; repeat < 4; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    const at::Tensor c = at::mm(a, b);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, 2.0 * kSize * kSize * kSize / seconds.count());
  }
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

}  // namespace

c10::Device parse(const std::string& text) {
  std::optional<c10::Device> device;
  try {
    if (text.rfind("npu", 0) == 0) {
      throw_error<DeviceError>("device '{}': this build has no Ascend back end", text);
    }
    device.emplace(text);
  } catch (const c10::Error&) {
  }
  if (!device ||
      (device->type() != c10::DeviceType::CPU && device->type() != c10::DeviceType::CUDA)) {
    throw_error<ConfigError>("device '{}': expected cpu, cuda, cuda:N, npu or npu:N", text);
  }
  if (device->type() == c10::DeviceType::CPU) return c10::Device(c10::DeviceType::CPU);
  if (const auto reason = cuda::unavailable())
    throw_error<DeviceError>("device '{}': {}", text, *reason);
  const int index = device->has_index() ? device->index() : 0;
  const auto count = static_cast<int>(cuda::list().size());
  if (index >= count)
    throw_error<DeviceError>("device '{}': the machine has {} CUDA device(s)", text, count);
  return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
}

void synchronize(c10::Device device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

Memory memory(c10::Device device) {
  Memory result;
  if (device.is_cpu()) {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    result.used_bytes = resident_bytes();
    result.peak_bytes = static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
    result.total_bytes = host_memory_bytes();
    return result;
  }
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  result.used_bytes = stats.allocated_bytes[kAll].current;
  result.peak_bytes = stats.allocated_bytes[kAll].peak;
  const auto all = cuda::list();
  result.total_bytes = all.at(static_cast<std::size_t>(device.index())).memory_bytes;
  return result;
}

Properties properties(c10::Device device, int dtype_bits) {
  Properties result;
  if (device.is_cpu()) {
    result.name = fmt::format("{} ({} cores)", cpu_name(), available_cores());
    const c10::ScalarType dtype = dtype_bits == 64   ? c10::kDouble
                                  : dtype_bits == 16 ? c10::kBFloat16
                                                     : c10::kFloat;
    result.peak_flops = measured_gemm_flops(dtype);
    return result;
  }
  result.name = cuda::list().at(static_cast<std::size_t>(device.index())).name;
  result.peak_flops = accelerator_flops(result.name, dtype_bits);
  result.on_chip_bytes = cuda::on_chip_bytes(device.index());
  return result;
}

void set_cpu_threads(int threads) {
  at::set_num_threads(threads > 0 ? threads : available_cores());
}

std::vector<Accelerator> accelerators(std::string& why_none) {
  if (const auto reason = cuda::unavailable()) {
    why_none = *reason;
    return {};
  }
  return cuda::list();
}

}  // namespace heddle::device
