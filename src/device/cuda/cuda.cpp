#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cuda_runtime_api.h>

#include <fmt/format.h>

#include "base/errors.h"
#include "device/backend.h"
#include "device/cuda/graph.h"

namespace heddle::device::cuda {
namespace {

std::optional<std::string> unavailable() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    return fmt::format("the CUDA driver reports: {}; is an NVIDIA driver for CUDA 13 installed?",
                       cudaGetErrorString(status));
  }
  if (count == 0) return "the CUDA driver shows no device";
  return std::nullopt;
}

std::vector<Accelerator> list() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return {};
  std::vector<Accelerator> found;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    found.push_back({.name = properties.name,
                     .memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem),
                     .capability = fmt::format("sm_{}{}", properties.major, properties.minor),
                     .device = {}});
  }
  return found;
}

std::int64_t on_chip_bytes(int index) {
  int bytes = 0;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index) != cudaSuccess)
    return 0;
  return bytes;
}

constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

c10::CachingDeviceAllocator::DeviceStats stats_of(int index) {
  return c10::getDeviceAllocator(c10::DeviceType::CUDA)
      ->getDeviceStats(static_cast<c10::DeviceIndex>(index));
}

Memory memory(int index) {
  const auto stats = stats_of(index);
  Memory result;
  result.used_bytes = stats.allocated_bytes[kAll].current;
  result.peak_bytes = stats.allocated_bytes[kAll].peak;
  return result;
}

std::int64_t free_bytes(int index) {
  const c10::DeviceGuard guard(
      c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)));
  std::size_t free = 0, total = 0;
  if (const cudaError_t status = cudaMemGetInfo(&free, &total); status != cudaSuccess)
    throw_error<DeviceError>("cudaMemGetInfo: {}", cudaGetErrorString(status));
  const auto stats = stats_of(index);
  return static_cast<std::int64_t>(free) + stats.reserved_bytes[kAll].current -
         stats.allocated_bytes[kAll].current;
}

void start(int index) {
  c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA)
      .setDevice(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)));
}

void synchronize(int index) {
  c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA)
      .synchronizeDevice(static_cast<c10::DeviceIndex>(index));
}

}  // namespace

const Backend& backend() {
  static const Backend kCuda = {.name = "cuda",
                                .unavailable = unavailable,
                                .list = list,
                                .on_chip_bytes = on_chip_bytes,
                                .memory = memory,
                                .free_bytes = free_bytes,
                                .synchronize = synchronize,
                                .start = start,
                                .finish = nullptr,
                                .record = record};
  return kCuda;
}

}  // namespace heddle::device::cuda
