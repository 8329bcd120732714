#include "ckpt/hub_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "fixtures.h"
#include "testing/temporary_directory.h"

namespace heddle::ckpt {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

class HubCache : public ::testing::Test {
 protected:
  void SetUp() override {
    unsetenv("HF_HUB_CACHE");
    setenv("HF_HOME", (dir_ / "hf").c_str(), 1);
    setenv("HOME", dir_.path().c_str(), 1);
    std::filesystem::create_directories(folder_ / "refs");
    add_snapshot("abc");
    add_snapshot("def");
    files::write_atomically(folder_ / "refs" / "main", "def\n");
  }
  void TearDown() override { unsetenv("HF_HOME"); }
  void add_snapshot(const std::string& revision) const {
    std::filesystem::create_directories(folder_ / "snapshots" / revision);
    files::write_atomically(folder_ / "snapshots" / revision / "config.json", "{}");
  }

  heddle::testing::TemporaryDirectory dir_;
  const Path folder_ = dir_ / "hf" / "hub" / "models--Qwen--Qwen3.5-0.8B";
};

TEST_F(HubCache, FindsModelsByNameFolderAndHome) {
  EXPECT_EQ(find_model("Qwen/Qwen3.5-0.8B"), folder_ / "snapshots" / "def");
  EXPECT_EQ(find_model(folder_.string()), folder_ / "snapshots" / "def");
  setenv("HF_HUB_CACHE", (dir_ / "hf" / "hub").c_str(), 1);
  setenv("HF_HOME", "/nowhere", 1);
  EXPECT_EQ(find_model("Qwen/Qwen3.5-0.8B"), folder_ / "snapshots" / "def");
  unsetenv("HF_HUB_CACHE");
  std::filesystem::create_directories(dir_ / "models" / "own");
  EXPECT_EQ(find_model("~/models/own"), dir_ / "models" / "own");
}

TEST_F(HubCache, LeavesWhatItDoesNotKnow) {
  for (const char* name : {"Qwen/Other", "models/a/b", "none", "", "../Qwen/Qwen3.5-0.8B"})
    EXPECT_EQ(find_model(name), name);
  EXPECT_THAT(advice_on_model_name("Qwen/Other"), HasSubstr("hf download Qwen/Other --local-dir"));
  EXPECT_THAT(advice_on_model_name("runs/*/final"), HasSubstr("patterns are not expanded"));
  EXPECT_EQ(advice_on_model_name("/models/none"), "");
}

TEST_F(HubCache, RefusesAFolderWithoutOneSnapshot) {
  std::filesystem::remove(folder_ / "refs" / "main");
  EXPECT_THAT(message_of<ModelError>([&] { find_model("Qwen/Qwen3.5-0.8B"); }),
              HasSubstr("several snapshots"));
  std::filesystem::remove_all(folder_ / "snapshots" / "abc");
  EXPECT_EQ(find_model("Qwen/Qwen3.5-0.8B"), folder_ / "snapshots" / "def");
  std::filesystem::remove_all(folder_ / "snapshots");
  EXPECT_THAT(message_of<ModelError>([&] { find_model("Qwen/Qwen3.5-0.8B"); }),
              HasSubstr("no snapshot"));
}

TEST_F(HubCache, CallsASnapshotByItsNameOnTheHub) {
  EXPECT_EQ(model_name(folder_ / "snapshots" / "def"), "Qwen/Qwen3.5-0.8B");
  EXPECT_EQ(model_name("/models/../models/own"), "/models/own");
}

}  // namespace
}  // namespace heddle::ckpt
