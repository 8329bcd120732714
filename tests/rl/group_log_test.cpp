#include "rl/group_log.h"

#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/files.h"
#include "testing/temporary_directory.h"

namespace heddle::rl {
namespace {

namespace fs = std::filesystem;

class GroupLogFile : public ::testing::Test {
 protected:
  std::string kept_of(const std::string& text, std::int64_t step) {
    files::write_atomically(file_, text);
    GroupLog(file_).keep_up_to(step);
    return files::read(file_);
  }
  testing::TemporaryDirectory folder_;
  fs::path file_ = folder_ / "groups.jsonl";
};

TEST_F(GroupLogFile, KeepsWholeRowsUpToAStepAlone) {
  const std::string one = "{\"step\": 1, \"prompt\": \"\\u001b[2J\"}\n", two = "{\"step\": 2}\n";
  for (const std::string& bad :
       {std::string("{\"step\": 1, \"pro"), std::string("{\"step\": \"1\"}"),
        std::string("{\"step\": 1e300}"), std::string("{\"step\": [1]}"), std::string("[1]"),
        std::string("7"), std::string("{}"), std::string(100'000, '['), std::string(1000, '\0'),
        std::string("{\"step\": 1, \"step\": 1}"), std::string("\xff\xfe"),
        "{\"step\": 1, \"t\": \"" + std::string(80 << 20, 't') + "\"}"}) {
    EXPECT_EQ(kept_of(one + bad + "\n" + one + two, 1), one + one) << bad.substr(0, 40);
    EXPECT_EQ(kept_of(one + bad, 1), one) << bad.substr(0, 40);
  }
  EXPECT_EQ(kept_of("", 1), "");
  EXPECT_EQ(kept_of(one + two, 0), "");
}

TEST_F(GroupLogFile, AppendsAndFollowsNoLink) {
  const GroupLog log(file_);
  log.write(3, 1, {}, {});
  log.write(4, 1, {}, {});
  EXPECT_EQ(kept_of(files::read(file_), 3).find("{\"step\":3,"), 0u);
  const std::string before = files::read(file_);
  files::write_atomically(folder_ / "other", "untouched");
  fs::remove(file_);
  fs::create_symlink(folder_ / "other", file_);
  EXPECT_THROW(log.write(4, 1, {}, {}), Error);
  EXPECT_EQ(files::read(folder_ / "other"), "untouched");
  fs::remove(file_);
  fs::create_directory(file_);
  EXPECT_THROW(log.write(4, 1, {}, {}), Error);
}

}  // namespace
}  // namespace heddle::rl
