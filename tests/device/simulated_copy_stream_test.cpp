// Copies beside the computation, on the simulated NPU.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "device/copy_stream.h"
#include "device/device.h"
#include "device/download.h"
#include "device/sim/simulation.h"

namespace heddle::device::sim {
namespace {

class SimulatedCopyStream : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { start(); }
  c10::Device npu_{c10::DeviceType::PrivateUse1, 0};
  at::Tensor numbers_ = at::arange(1000, at::TensorOptions().dtype(at::kFloat)).to(npu_);
};

TEST_F(SimulatedCopyStream, ATensorComesBackAsItWent) {
  CopyStream out(npu_), back(npu_);
  const at::Tensor host = host_like(numbers_);
  EXPECT_TRUE(host.is_cpu());
  EXPECT_TRUE(host.is_pinned());
  CopyStream::Copy copy = out.begin(host, numbers_);
  copy.wait();
  copy.wait();  // nothing to do a second time
  const at::Tensor again = at::empty(host.sizes(), numbers_.options());
  CopyStream::Copy second = back.begin(again, host);
  second.wait();
  device::synchronize(npu_);
  EXPECT_TRUE(at::equal(again.cpu(), numbers_.cpu()));
}

TEST_F(SimulatedCopyStream, KeepsBothTensorsUntilItIsWaitedFor) {
  CopyStream stream(npu_);
  at::Tensor host = host_like(numbers_);
  CopyStream::Copy copy = stream.begin(host, numbers_);
  const auto users = [&] { return numbers_.use_count() + host.use_count(); };
  EXPECT_EQ(users(), 4u);
  copy.wait();
  EXPECT_EQ(users(), 2u);
}

TEST_F(SimulatedCopyStream, ADownloadHoldsWhatTheTensorsWereWhenItWasQueued) {
  const at::Tensor before = numbers_.cpu(), here = at::arange(3);
  Download download({numbers_, at::Tensor(), here});
  numbers_.zero_();
  const std::vector<at::Tensor>& copies = download.wait();
  ASSERT_EQ(copies.size(), 3u);
  EXPECT_TRUE(at::equal(copies[0], before));
  EXPECT_TRUE(copies[0].is_cpu());
  EXPECT_FALSE(copies[1].defined());
  EXPECT_TRUE(at::equal(copies[2], here));
  EXPECT_TRUE(at::equal(download.wait()[0], before));  // a second time
}

}  // namespace
}  // namespace heddle::device::sim
