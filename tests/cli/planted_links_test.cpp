// The program itself in folders where somebody has put links under the names that it will write.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <set>

#include "program.h"

namespace heddle::cli {
namespace {

using ::testing::HasSubstr;

constexpr const char* kUntouched = "untouched";
constexpr uid_t kOther = 12345;

class PlantedLinks : public ::testing::Test {
 protected:
  void SetUp() override { folder_.write("victim", kUntouched); }

  /// Names below the folder, of files and of folders.
  static std::set<std::string> names_in(const fs::path& folder, bool are_folders) {
    std::set<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(folder))
      if (entry.is_directory() == are_folders)
        names.insert(entry.path().lexically_relative(folder).string());
    return names;
  }

  /// Runs with a link to a file, and with one that leads nowhere, in the place of `name`.
  void expect_victims_untouched(const std::string& output, const std::string& name,
                                const Arguments& arguments) {
    for (const char* target : {"victim", "nothing"}) {
      fs::remove_all(folder_.at(output));
      fs::create_directories(fs::path(folder_.at(output + "/" + name)).parent_path());
      fs::create_symlink(folder_.at(target), folder_.at(output + "/" + name));
      const int status = wait_for(start(folder_, arguments));
      EXPECT_EQ(files::read(folder_.at("victim")), kUntouched) << name;
      EXPECT_FALSE(fs::exists(folder_.at("nothing"))) << name;
      // The name is free for what belongs there, or the message says what is in the way.
      const std::string in_the_way = name.substr(0, name.find('/'));
      if (status != 0) EXPECT_THAT(message(folder_), HasSubstr(in_the_way)) << name;
      fs::remove(folder_.at("nothing"));
    }
  }

  Folder folder_;
};

/// Some fifty runs.
class FaultPlantedLinks : public PlantedLinks {};

TEST_F(FaultPlantedLinks, NoFileOfARunIsWrittenThroughOne) {
  const Arguments arguments = folder_.train(
      {"ckpt.every=1", "train.max_steps=2", "log.report=true", "log.tensorboard=true"});
  ASSERT_EQ(wait_for(start(folder_, arguments)), 0) << message(folder_);
  const std::set<std::string> names = names_in(folder_.at("run"), false);
  EXPECT_GE(names.size(), 15u);
  for (const std::string& name : names)
    if (!name.starts_with("tensorboard/")) expect_victims_untouched("run", name, arguments);
  for (const char* temporary : {"final.tmp", "report.html.tmp", "report.json.tmp",
                                "config.resolved.yaml.tmp", "metrics.jsonl.tmp"})
    expect_victims_untouched("run", temporary, arguments);
}

TEST_F(PlantedLinks, NoLogOfALaunchIsWrittenThroughOne) {
  Arguments arguments = {"launch", "--nproc", "2", "--log-dir", folder_.at("logs"), "--"};
  const Arguments train = folder_.train({"train.max_steps=1", "parallel.fsdp=2"});
  arguments.insert(arguments.end(), train.begin(), train.end());
  for (const char* name : {"rank-0.log", "rank-1.log", "rank-0.log.tmp", "rank-1.previous.log"}) {
    fs::remove_all(folder_.at("run"));
    expect_victims_untouched("logs", name, arguments);
  }
}

TEST_F(PlantedLinks, NoResultOfACommandIsWrittenThroughOne) {
  const auto score = [&](const std::string& output) {
    return Arguments{
        "score",    folder_.at("model"),         "--input",   folder_.at("train.jsonl"),
        "--output", folder_.at("out/" + output), "--threads", "1"};
  };
  for (const char* name : {"scored.jsonl.tmp", "scored.jsonl.tmp-1"})
    expect_victims_untouched("out", name, score("scored.jsonl"));
  const Arguments copy = {"export", folder_.at("model"), "--output", folder_.at("out/copy")};
  for (const char* name : {"copy.tmp", "copy.tmp/model.safetensors", "copy.tmp/.heddle-staging"})
    expect_victims_untouched("out", name, copy);
  folder_.replace("model/config.json", "\"vocab_size\"",
                  "\"max_position_embeddings\": 64, \"linear_conv_kernel_dim\": 4, \"vocab_size\"");
  const Arguments gguf = {"export", folder_.at("model"), "--gguf", "--output",
                          folder_.at("out/m.gguf")};
  for (const char* name : {"m.gguf.tmp", "m.gguf.tmp-1"})
    expect_victims_untouched("out", name, gguf);
}

TEST_F(PlantedLinks, NoStagingFolderIsALink) {
  const Arguments copy = {"export", folder_.at("model"), "--output", folder_.at("copy")};
  for (const bool has_marker : {false, true}) {
    fs::create_directory(folder_.at("elsewhere"));
    if (has_marker) folder_.write("elsewhere/.heddle-staging", "");
    fs::create_directory_symlink(folder_.at("elsewhere"), folder_.at("copy.tmp"));
    EXPECT_EQ(wait_for(start(folder_, copy)), 1);
    EXPECT_THAT(message(folder_), HasSubstr("copy.tmp is in the way"));
    EXPECT_EQ(names_in(folder_.at("elsewhere"), false).size(), has_marker ? 1u : 0u);
    fs::remove(folder_.at("copy.tmp"));
    fs::remove_all(folder_.at("elsewhere"));
  }
}

TEST_F(PlantedLinks, AFolderOfTheRunMayBeALinkOfItsOwnerAndOfNobodyElse) {
  if (geteuid() != 0) GTEST_SKIP() << "NOT TESTED: a link of another user needs root";
  for (const std::string name :
       {"checkpoints", "tensorboard", "cache", "final", "anything", "checkpoints/step-00000001"}) {
    for (const uid_t owner : {uid_t{0}, kOther}) {
      fs::remove_all(folder_.at("run"));
      fs::create_directories(folder_.at("elsewhere"));
      fs::create_directories(fs::path(folder_.at("run/" + name)).parent_path());
      fs::create_directory_symlink(folder_.at("elsewhere"), folder_.at("run/" + name));
      ASSERT_EQ(lchown(folder_.at("run/" + name).c_str(), owner, owner), 0);
      const int status =
          wait_for(start(folder_, folder_.train({"train.max_steps=1", "ckpt.every=1"})));
      if (owner == 0 && name.find('/') == std::string::npos) {
        EXPECT_EQ(status, 0) << name << ": " << message(folder_);
      }
      if (owner == kOther) {
        EXPECT_EQ(status, 2) << name;
        EXPECT_THAT(message(folder_), HasSubstr(name + " is a link that another user"));
        EXPECT_TRUE(fs::is_empty(folder_.at("elsewhere"))) << name;
      }
      fs::remove_all(folder_.at("elsewhere"));
    }
  }
}

}  // namespace
}  // namespace heddle::cli
