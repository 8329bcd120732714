// train.recompute: auto on several ranks: one choice, which changes no bit.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "dist/launched_run.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;
using Words = std::vector<std::string>;

class AutoRecomputeOverRanks : public ::testing::TestWithParam<const char*> {
 protected:
  std::string run(const std::string& name, Words more) {
    more.insert(more.end(), {std::string("parallel.") + GetParam() + "=2", "train.max_steps=5",
                             // Larger activations than what the log rounds away.
                             "data.max_length=192", "train.micro_batch_tokens=192"});
    EXPECT_EQ(runs_.run(name, 2, "dense", more), 0) << runs_.printed(name);
    return runs_.printed(name);
  }
  /// Bytes that a policy needs according to the log.
  static double bytes(const std::string& printed, const std::string& policy) {
    std::smatch found;
    EXPECT_TRUE(std::regex_search(printed, found, std::regex(policy + ": ([0-9.]+) ([KMG])iB[;,]")))
        << printed;
    if (found.size() < 3) return 0;
    const double unit = found[2] == "K" ? 1 << 10 : found[2] == "M" ? 1 << 20 : 1 << 30;
    return std::stod(found[1]) * unit;
  }
  void expect_same_steps(const std::string& a, const std::string& b) {
    const auto first = runs_.metrics(a), second = runs_.metrics(b);
    ASSERT_EQ(first.size(), 5u);
    ASSERT_EQ(second.size(), 5u);
    for (std::size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(first[i].loss, second[i].loss) << b << ", step " << i + 1;
      EXPECT_EQ(first[i].grad_norm, second[i].grad_norm) << b << ", step " << i + 1;
    }
  }

  testing::LaunchedRuns runs_;
};

TEST_P(AutoRecomputeOverRanks, ChoosesAlikeAndChangesNoBit) {
  run("off", {});
  const std::string all = run("all", {"train.recompute=auto"});
  EXPECT_THAT(all, HasSubstr("train.recompute: auto: off, "));
  expect_same_steps("off", "all");
  const double off = bytes(all, "off"), full = bytes(all, "full");
  ASSERT_LT(full, off);
  const double limit = (full + off) / 2 / 0.94 / (1 << 30);
  const std::string some =
      run("some", {"train.recompute=auto", fmt::format("train.memory_limit_gib={}", limit)});
  EXPECT_THAT(some, HasSubstr("train.recompute: auto: "));
  // Memory that threads of collectives free is counted as held on the CPU (device::MemoryMeter),
  // and along tp that is as much as what is chosen about.
  if (std::string(GetParam()) != "tp") {
    for (const char* end : {"off", "full"}) {
      EXPECT_EQ(some.find(fmt::format("train.recompute: auto: {}, ", end)), std::string::npos)
          << some;
    }
  }
  expect_same_steps("off", "some");
}

INSTANTIATE_TEST_SUITE_P(Layouts, AutoRecomputeOverRanks, ::testing::Values("fsdp", "pp", "tp"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace heddle
