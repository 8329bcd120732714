#include "ui/metrics_command.h"

#include <gtest/gtest.h>

#include <chrono>

#include "base/files.h"
#include "testing/temporary_directory.h"

namespace heddle::ui {
namespace {

using heddle::testing::TemporaryDirectory;

TEST(MetricsCommand, GetsEveryLineBeforeItIsWaitedFor) {
  const TemporaryDirectory folder;
  const auto file = folder / "rows";
  std::string expected;
  {
    MetricsCommand command("sleep 0.1; cat > " + file.string());
    for (int i = 0; i < 20'000; ++i) {
      const std::string line = "{\"step\":" + std::to_string(i) + "}";
      command.write(line);
      expected += line + "\n";
    }
  }
  EXPECT_EQ(files::read(file), expected);
}

TEST(MetricsCommand, DoesNotGetTheSecretOfTheJob) {
  const TemporaryDirectory folder;
  const auto file = folder / "environment";
  setenv("HEDDLE_LAUNCH_SECRET", "of the job", 1);
  setenv("HEDDLE_OTHER", "of the user", 1);
  { MetricsCommand command("env > " + file.string()); }
  unsetenv("HEDDLE_LAUNCH_SECRET");
  unsetenv("HEDDLE_OTHER");
  EXPECT_EQ(files::read(file).find("of the job"), std::string::npos);
  EXPECT_NE(files::read(file).find("HEDDLE_OTHER=of the user"), std::string::npos);
}

TEST(MetricsCommand, ThatEndsOrDoesNotReadCostsNoRun) {
  MetricsCommand ended("exit 3");
  MetricsCommand missing("/no/such/program 2> /dev/null");
  for (int i = 0; i < 50'000; ++i) {
    ended.write("{\"step\": 1}");
    missing.write("{\"step\": 1}");
  }
}

}  // namespace
}  // namespace heddle::ui
