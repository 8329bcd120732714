#include "plan/hardware.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/files.h"
#include "testing/temporary_directory.h"

namespace heddle::plan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class HardwareTest : public ::testing::Test {
 protected:
  std::string file(const std::string& text) {
    files::write_atomically(folder_ / "gpu.yaml", text);
    return (folder_ / "gpu.yaml").string();
  }
  void expect_refused(const std::string& text, const std::string& line, const std::string& part) {
    const std::string path = file(text);
    EXPECT_THAT([&] { find_hardware(path); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("gpu.yaml" + line), HasSubstr(part))))
        << text;
  }
  testing::TemporaryDirectory folder_;
};

TEST_F(HardwareTest, AFileChangesWhatItNamesOfItsBase) {
  const Hardware mine = find_hardware(file("base: h100\nnetwork_gbs: 100\ngpus_per_host: 4\n"));
  const Hardware h100 = find_hardware("h100");
  EXPECT_EQ(mine.network_gbs, 100);
  EXPECT_EQ(mine.gpus_per_host, 4);
  EXPECT_EQ(mine.memory_gbs, h100.memory_gbs);
  EXPECT_EQ(mine.products, h100.products);
}

TEST_F(HardwareTest, NamesFileLineAndKeyOfAMistake) {
  expect_refused("base: h100\npeak_tflop: 3\n", ":2", "did you mean 'peak_tflops'?");
  expect_refused("base: h100\nproducts: 1.5\n", ":2", "at most 1");
  expect_refused("base: h100\nmemory_gib: many\n", ":2", "found 'many'");
  expect_refused("base: h1000\n", ":1", "unknown hardware 'h1000'");
  expect_refused("peak_tflops: 100\n", "", "memory_gib is missing");
  expect_refused("- a\n", "", "expected keys");
  EXPECT_THAT([] { find_hardware("abacus"); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("abacus"), HasSubstr("h200"))));
}

}  // namespace
}  // namespace heddle::plan
