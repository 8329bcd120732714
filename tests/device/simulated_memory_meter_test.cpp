#include "device/memory_meter.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/errors.h"
#include "testing/device.h"

namespace heddle::device {
namespace {

constexpr std::int64_t kBytes = 3 << 20;

at::Tensor tensor(c10::Device device) {
  return at::empty({kBytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

void measure(c10::Device device) {
  const at::Tensor before = tensor(device);
  MemoryMeter meter(device);
  EXPECT_EQ(meter.used_bytes(), 0);
  at::Tensor kept = tensor(device);
  { const at::Tensor passing = tensor(device); }
  EXPECT_EQ(meter.used_bytes(), kBytes);
  EXPECT_EQ(meter.take_peak(), 2 * kBytes);
  EXPECT_EQ(meter.take_peak(), kBytes);
  kept.reset();
  EXPECT_EQ(meter.used_bytes(), 0);
  EXPECT_EQ(meter.take_peak(), kBytes);
  EXPECT_FALSE(MemoryMeter::is_possible());
  EXPECT_THROW(MemoryMeter{device}, InternalError);
}

TEST(MemoryMeter, CountsWhatTensorsHold) {
  measure(c10::Device(c10::kCPU));
  EXPECT_TRUE(MemoryMeter::is_possible());
}

TEST(MemoryMeter, CountsOnTheSimulatedNpu) { measure(testing::simulated_npu()); }

TEST(MemoryMeter, OnTheCpuCountsItsThreadAlone) {
  const c10::Device cpu(c10::kCPU);
  const MemoryMeter meter(cpu);
  at::Tensor other;
  std::thread([&] {
    EXPECT_TRUE(MemoryMeter::is_possible());
    other = tensor(cpu);
  }).join();
  EXPECT_EQ(meter.used_bytes(), 0);
}

}  // namespace
}  // namespace heddle::device
