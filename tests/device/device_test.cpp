#include "device/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "device/graph.h"

namespace heddle::device {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Device, TextThatNamesNoDeviceIsTheUsersError) {
  for (const char* text : {"", "gpu", "npux", "npu:", "npu:-1", "meta", "cuda:x"}) {
    EXPECT_THAT([&] { parse(text); }, ThrowsMessage<ConfigError>(HasSubstr(text))) << text;
  }
}

TEST(Device, CpuHasOneDevice) {
  EXPECT_TRUE(parse("cpu").is_cpu());
  EXPECT_GT(memory(parse("cpu")).total_bytes, 0);
  synchronize(parse("cpu"));
  start(parse("cpu"));
}

TEST(Device, TheCpuRecordsNoGraphs) {
  EXPECT_THAT([] { record(parse("cpu"), [] {}); },
              ThrowsMessage<DeviceError>(HasSubstr("no graphs on cpu")));
}

TEST(Device, WhyThereIsNoAcceleratorNamesEveryBackEnd) {
  std::string why;
  if (!accelerators(why).empty()) GTEST_SKIP() << "this machine has one";
  EXPECT_THAT(why, HasSubstr("CUDA"));
  EXPECT_THAT(why, HasSubstr("Ascend"));
}

}  // namespace
}  // namespace heddle::device
