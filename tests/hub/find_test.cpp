#include "hub/find.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "base/errors.h"
#include "base/hugging_face_cache.h"
#include "hub/cache.h"
#include "hub/repository.h"
#include "testing/temporary_directory.h"

namespace heddle::hub {
namespace {

using files::Path;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class E, class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "(no error)";
}

class FindModel : public ::testing::Test {
 protected:
  void SetUp() override {
    unsetenv("HF_HUB_CACHE");
    setenv("HF_HUB_OFFLINE", "1", 1);
    setenv("HF_HOME", (dir_ / "hf").c_str(), 1);
    setenv("HOME", dir_.path().c_str(), 1);
    std::filesystem::create_directories(folder_ / "refs");
    add_snapshot("abc");
    add_snapshot("def");
    files::write_atomically(folder_ / "refs" / "main", "def\n");
  }
  void TearDown() override {
    unsetenv("HF_HOME");
    unsetenv("HF_HUB_OFFLINE");
    unsetenv("MODELSCOPE_CACHE");
  }
  void add_snapshot(const std::string& revision) const {
    std::filesystem::create_directories(folder_ / "snapshots" / revision);
    for (const char* file : {"config.json", "tokenizer.json", "model.safetensors"})
      files::write_atomically(folder_ / "snapshots" / revision / file, "{}");
  }

  heddle::testing::TemporaryDirectory dir_;
  const Path folder_ = dir_ / "hf" / "hub" / "models--Qwen--Qwen3.5-0.8B";
};

TEST_F(FindModel, FindsModelsByNameFolderAndHome) {
  EXPECT_EQ(find_model("Qwen/Qwen3.5-0.8B"), folder_ / "snapshots" / "def");
  EXPECT_EQ(find_model(folder_.string()), folder_ / "snapshots" / "def");
  setenv("HF_HUB_CACHE", (dir_ / "hf" / "hub").c_str(), 1);
  setenv("HF_HOME", "/nowhere", 1);
  EXPECT_EQ(find_model("Qwen/Qwen3.5-0.8B"), folder_ / "snapshots" / "def");
  unsetenv("HF_HUB_CACHE");
  std::filesystem::create_directories(dir_ / "models" / "own");
  EXPECT_EQ(find_model("~/models/own"), dir_ / "models" / "own");
}

TEST_F(FindModel, LeavesPathsAsTheyAre) {
  for (const char* name : {"models/a/b", "none", "", "../Qwen/Qwen3.5-0.8B", "./Qwen/Other"})
    EXPECT_EQ(find_model(name), name);
  EXPECT_THAT(advice_on_model_name("runs/*/final"), HasSubstr("patterns are not expanded"));
  EXPECT_EQ(advice_on_model_name("/models/none"), "");
}

TEST_F(FindModel, OfflineTakesOnlyWhatIsWhole) {
  EXPECT_THAT(message_of<ModelError>([] { find_model("Qwen/Other"); }),
              HasSubstr("HF_HUB_OFFLINE"));
  std::filesystem::remove(folder_ / "snapshots" / "def" / "model.safetensors");
  EXPECT_THAT(message_of<ModelError>([] { find_model("Qwen/Qwen3.5-0.8B"); }),
              HasSubstr("as a whole"));
  EXPECT_EQ(find_model("Qwen/Qwen3.5-0.8B", {}, Need::kTokenizer), folder_ / "snapshots" / "def");
  EXPECT_EQ(find_model("hf://Qwen/Qwen3.5-0.8B@abc"), folder_ / "snapshots" / "abc");
  files::write_atomically(
      folder_ / "snapshots" / "def" / "model.safetensors.index.json",
      R"({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})");
  files::write_atomically(folder_ / "snapshots" / "def" / "model-1.safetensors", "");
  EXPECT_THAT(message_of<ModelError>([] { find_model("Qwen/Qwen3.5-0.8B"); }),
              HasSubstr("as a whole"));
  files::write_atomically(folder_ / "snapshots" / "def" / "model-2.safetensors", "");
  EXPECT_EQ(find_model("Qwen/Qwen3.5-0.8B"), folder_ / "snapshots" / "def");
}

TEST_F(FindModel, ReadsTheCacheOfModelScope) {
  setenv("MODELSCOPE_CACHE", (dir_ / "ms").c_str(), 1);
  const Path folder = dir_ / "ms" / "models" / "Qwen" / "Qwen3___5-0___8B";
  std::filesystem::create_directories(folder);
  for (const char* file : {"config.json", "tokenizer.json", "model.safetensors"})
    files::write_atomically(folder / file, "{}");
  EXPECT_EQ(find_model("ms://Qwen/Qwen3.5-0.8B"), folder);
}

TEST_F(FindModel, DataOfTheCacheByPart) {
  const Path folder = dir_ / "hf" / "hub" / "datasets--org--set";
  const Path snapshot = folder / "snapshots" / "abc";
  std::filesystem::create_directories(snapshot / "data");
  std::filesystem::create_directories(folder / "refs");
  files::write_atomically(folder / "refs" / "main", "abc");
  for (const char* file : {"data/train-0.jsonl", "data/train-1.jsonl", "data/test.jsonl", "x.md"})
    files::write_atomically(snapshot / file, "{}");
  const auto is_data = [](const std::string& name) { return name.ends_with(".jsonl"); };
  const auto at = [&](const char* file) { return (snapshot / file).string(); };
  EXPECT_THAT(find_data("org/set", Part::kTrain, is_data),
              ElementsAre(at("data/train-0.jsonl"), at("data/train-1.jsonl")));
  EXPECT_THAT(find_data("org/set", Part::kEvaluation, is_data), ElementsAre(at("data/test.jsonl")));
  EXPECT_THAT(find_data("hf://datasets/org/set/data/*-1*", Part::kTrain, is_data),
              ElementsAre(at("data/train-1.jsonl")));
  EXPECT_THAT(find_data("rows/none.jsonl", Part::kTrain, is_data), ElementsAre("rows/none.jsonl"));
  std::filesystem::create_directories(snapshot / "other");
  files::write_atomically(snapshot / "other" / "train.jsonl", "{}");
  EXPECT_THAT(message_of<DataError>([&] { find_data("org/set", Part::kTrain, is_data); }),
              HasSubstr("several sets of rows, in data, other"));
}

TEST(Repository, IsToldFromAPath) {
  EXPECT_EQ(parse_repository("org/name", Kind::kModel)->revision, "main");
  EXPECT_EQ(parse_repository("ms://org/name", Kind::kModel)->revision, "master");
  EXPECT_EQ(parse_repository("hf://datasets/org/name@v1/a/b.jsonl", Kind::kModel)->path,
            "a/b.jsonl");
  for (const char* path :
       {"name", "a/b/c", "/org/name", "org/", "../name", "org/a..b", "a b/c", "-"})
    EXPECT_FALSE(parse_repository(path, Kind::kModel)) << path;
  EXPECT_THAT(message_of<ConfigError>([] { parse_repository("hf://name", Kind::kModel); }),
              HasSubstr("hf://owner/name"));
}

TEST_F(FindModel, FollowsLinksOfTheOwnCacheAlone) {
  files::write_atomically(dir_ / "elsewhere.json", "{}");
  const auto read = [](const Path& folder) {
    std::filesystem::remove(folder / "config.json");
    std::filesystem::create_symlink("../../../../../elsewhere.json", folder / "config.json");
    return message_of<UserError>(
        [&] { files::read(folder / "config.json", files::kJsonLimit, folder); });
  };
  EXPECT_EQ(read(folder_ / "snapshots" / "abc"), "(no error)");
  setenv("HF_HOME", "/nowhere", 1);
  EXPECT_THAT(read(folder_ / "snapshots" / "abc"), HasSubstr("outside its folder"));
}

TEST_F(FindModel, RefusesAFolderWithoutOneSnapshot) {
  std::filesystem::remove_all(folder_ / "refs");
  EXPECT_THAT(message_of<ModelError>([&] { find_model(folder_.string()); }),
              HasSubstr("several snapshots"));
  std::filesystem::remove_all(folder_ / "snapshots" / "abc");
  EXPECT_EQ(find_model("Qwen/Qwen3.5-0.8B"), folder_ / "snapshots" / "def");
  std::filesystem::remove_all(folder_ / "snapshots" / "def");
  EXPECT_THAT(message_of<ModelError>([&] { find_model(folder_.string()); }),
              HasSubstr("no snapshot"));
}

TEST_F(FindModel, CallsASnapshotByItsNameOnTheHub) {
  EXPECT_EQ(model_name(folder_ / "snapshots" / "def"), "Qwen/Qwen3.5-0.8B");
  EXPECT_EQ(model_name("/models/../models/own"), "/models/own");
}

}  // namespace
}  // namespace heddle::hub
