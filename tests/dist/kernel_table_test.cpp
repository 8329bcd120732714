// P11: a layout changes no operator's kernel.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dist/launched_run.h"

namespace heddle {
namespace {

using testing::LaunchedRuns;
using Words = std::vector<std::string>;

class KernelTableTest : public ::testing::Test {
 protected:
  /// The kernels that a run of one step was done with, as its checkpoint has them.
  Words kernels(std::int64_t ranks, const std::string& model, Words words, bool is_npu) const {
    const std::string run = "run-" + std::to_string(++runs_made_);
    words.insert(words.end(), {"train.max_steps=1", "ckpt.every=1"});
    if (is_npu) words.push_back("device.name=npu");
    const std::map<std::string, std::string> environment =
        is_npu ? std::map<std::string, std::string>{{"HEDDLE_SIM_NPU", "1"}}
               : std::map<std::string, std::string>{};
    EXPECT_EQ(runs_.run(run, ranks, model, words, environment), 0) << runs_.printed(run);
    const auto state = runs_.directory() / run / "checkpoints" / "step-00000001" / "state.json";
    return nlohmann::json::parse(files::read(state)).at("kernels").get<Words>();
  }

  LaunchedRuns runs_;
  static inline int runs_made_ = 0;
};

TEST_F(KernelTableTest, P11UlyssesTakesTheKernelsOfOneRank) {
  for (const bool is_npu : {false, true}) {
    for (const char* model : {"dense", "moe"}) {
      const Words one = kernels(0, model, {}, is_npu);
      ASSERT_FALSE(one.empty());
      EXPECT_THAT(one, ::testing::Contains(::testing::StartsWith("gated_delta_rule: ")));
      EXPECT_EQ(kernels(2, model, {"parallel.cp=2", "parallel.cp_method=ulysses"}, is_npu), one);
    }
  }
}

TEST_F(KernelTableTest, P11NorDoesAnyOtherDivision) {
  const Words one = kernels(0, "moe", {}, false);
  for (const Words& layout : std::vector<Words>{{"parallel.cp=2"},
                                                {"parallel.tp=2"},
                                                {"parallel.fsdp=2", "parallel.ep=2"},
                                                {"parallel.pp=2"}})
    EXPECT_EQ(kernels(2, "moe", layout, false), one) << layout[0];
}

}  // namespace
}  // namespace heddle
