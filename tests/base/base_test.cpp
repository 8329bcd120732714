#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/errors.h"
#include "base/file_lock.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/rng.h"
#include "base/text.h"
#include "base/threads.h"
#include "testing/temporary_directory.h"

namespace heddle {
namespace {

TEST(Text, NearestFindsTheTypoAndRefusesTheUnrelated) {
  EXPECT_EQ(text::nearest("learning_rat", {"learning_rate", "weight_decay"}), "learning_rate");
  EXPECT_EQ(text::nearest("zzzzzzzz", {"lr", "seed"}), "");
}

TEST(Text, GlobMatchesNames) {
  EXPECT_TRUE(text::matches_glob("*.A_log", "model.layers.0.linear_attn.A_log"));
  EXPECT_TRUE(text::matches_glob("model.layers.?.mlp.*", "model.layers.3.mlp.gate_proj.weight"));
  EXPECT_FALSE(text::matches_glob("model.layers.?.mlp.*", "model.layers.13.mlp.gate_proj.weight"));
  EXPECT_TRUE(text::matches_glob("*", ""));
}

TEST(Files, AtomicFileLeavesNothingWithoutCommit) {
  const testing::TemporaryDirectory dir;
  files::write_atomically(dir / "a", "old");
  {
    files::AtomicFile file(dir / "a");
    file.write("half of the new");
  }
  EXPECT_EQ(files::read(dir / "a"), "old");
  EXPECT_FALSE(std::filesystem::exists(dir / "a.tmp"));
}

TEST(Files, AFullDiskIsAnErrorThatNamesPathAndReason) {
  files::AtomicFile* file = nullptr;
  EXPECT_THROW(file = new files::AtomicFile("/proc/heddle"), FileError);
  EXPECT_EQ(file, nullptr);
  try {
    files::read("/nonexistent/file");
    FAIL();
  } catch (const FileError& e) {
    EXPECT_THAT(e.what(), ::testing::HasSubstr("/nonexistent/file: No such file"));
  }
}

TEST(Files, ALockIsOfOneAtATimeAndSaysWhose) {
  const testing::TemporaryDirectory dir;
  files::FileLock second(dir / "lock");
  {
    files::FileLock first(dir / "lock");
    EXPECT_TRUE(first.try_lock());
    first.set_text("the first, at length");
    first.set_text("the first");
    EXPECT_FALSE(second.try_lock_for(0.1));
    EXPECT_EQ(second.text(), "the first");
  }
  EXPECT_TRUE(second.try_lock());
  EXPECT_THROW(files::FileLock("/nonexistent/lock"), FileError);
}

TEST(Log, AFileHasTheTimeAndTheLevelOnce) {
  const testing::TemporaryDirectory dir;
  log::add_file((dir / "log").string());
  log::warning("the configuration changed");
  log::info("on");
  EXPECT_THAT(files::read(dir / "log"),
              ::testing::MatchesRegex("[0-9T:.-]+ warning: the configuration changed\n"
                                      "[0-9T:.-]+ on\n"));
}

TEST(Log, TablesKeepTheirLinesAndNothingLooksLikeAnotherMessage) {
  const testing::TemporaryDirectory dir;
  log::add_file((dir / "log").string());
  log::info("model \x1b[1mtiny\x1b[0m\nrows 3");
  log::info("removed x\nerror: forged");
  log::warning("x\nerror: forged \x1b[2J");
  log::info("clear \x1b[2J\x1b]0;title\a");
  const std::string text = files::read(dir / "log");
  EXPECT_THAT(text, ::testing::HasSubstr("model \x1b[1mtiny\x1b[0m\nrows 3\n"));
  EXPECT_THAT(text, ::testing::HasSubstr("removed x\\nerror: forged\n"));
  EXPECT_THAT(text, ::testing::HasSubstr("warning: x\\nerror: forged \\x1b[2J\n"));
  EXPECT_THAT(text, ::testing::HasSubstr("clear \\x1b[2J\\x1b]0;title\\x07\n"));
}

TEST(Files, MapsAnEmptyFile) {
  const testing::TemporaryDirectory dir;
  std::ofstream(dir / "empty").flush();
  EXPECT_TRUE(files::MappedFile(dir / "empty").bytes().empty());
}

TEST(CounterRng, DependsOnlyOnSeedNameAndIndex) {
  const CounterRng a(1, "x"), b(1, "x"), c(2, "x"), d(1, "y");
  EXPECT_EQ(a.words(12345), b.words(12345));
  EXPECT_NE(a.words(12345), c.words(12345));
  EXPECT_NE(a.words(12345), d.words(12345));
  EXPECT_NE(a.words(0), a.words(1));
}

TEST(CounterRng, NormalHasUnitMoments) {
  const CounterRng rng(3, "normal");
  double sum = 0, squares = 0;
  constexpr int kCount = 200000;
  for (int i = 0; i < kCount; ++i) {
    const double x = rng.normal(i);
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.01);
  EXPECT_NEAR(squares / kCount, 1, 0.02);
}

TEST(Threads, ParallelItemsVisitsEachOnceAndRethrows) {
  std::vector<int> seen(1000);
  parallel_items(1000, 4, [&](std::int64_t i) { ++seen[i]; });
  EXPECT_THAT(seen, ::testing::Each(1));
  EXPECT_THROW(parallel_items(10, 3,
                              [](std::int64_t i) {
                                if (i == 5) throw DataError("row 5");
                              }),
               DataError);
}

TEST(Hash, SeparatesPieces) {
  EXPECT_NE(hash::Hasher().add("ab").add("c").hex(), hash::Hasher().add("a").add("bc").hex());
}

}  // namespace
}  // namespace heddle
