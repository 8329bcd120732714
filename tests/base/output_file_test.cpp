#include "base/output_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <thread>

#include "base/errors.h"
#include "testing/temporary_directory.h"

namespace heddle::files {
namespace {

class OutputFiles : public ::testing::Test {
 protected:
  static void put(const Path& path, std::string_view text) {
    OutputFile file(path);
    file.write(text);
    file.commit();
  }
  testing::TemporaryDirectory dir_;
};

TEST_F(OutputFiles, ReplacesAPlainFileOnlyWhenItIsWhole) {
  put(dir_ / "a", "old");
  {
    OutputFile file(dir_ / "a");
    file.write("half");
  }
  EXPECT_EQ(read(dir_ / "a"), "old");
  put(dir_ / "a", "new");
  EXPECT_EQ(read(dir_ / "a"), "new");
}

TEST_F(OutputFiles, WritesThroughLinksAndLeavesThem) {
  std::filesystem::create_directory(dir_ / "elsewhere");
  put(dir_ / "elsewhere/target", "old");
  std::filesystem::create_symlink("elsewhere/target", dir_ / "link");
  std::filesystem::create_symlink("link", dir_ / "chain");
  std::filesystem::create_symlink("elsewhere/none", dir_ / "dangling");
  for (const char* name : {"link", "chain"}) {
    put(dir_ / name, name);
    EXPECT_TRUE(std::filesystem::is_symlink(dir_ / name));
    EXPECT_EQ(read(dir_ / "elsewhere/target"), name);
  }
  put(dir_ / "dangling", "made");
  EXPECT_EQ(read(dir_ / "elsewhere/none"), "made");
}

TEST_F(OutputFiles, WritesIntoPipesAndDevices) {
  ASSERT_EQ(mkfifo((dir_ / "pipe").c_str(), 0600), 0);
  std::string got;
  std::thread reader([&] {
    std::ifstream pipe(dir_ / "pipe");
    std::getline(pipe, got);
  });
  put(dir_ / "pipe", "rows");
  reader.join();
  EXPECT_EQ(got, "rows");
  EXPECT_TRUE(std::filesystem::is_fifo(dir_ / "pipe"));
  std::filesystem::create_symlink("/dev/null", dir_ / "null");
  put(dir_ / "null", "rows");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  // A name of an open file is written to, whatever stands at its end.
  const int open_file = ::open((dir_ / "log").c_str(), O_WRONLY | O_CREAT, 0600);
  put("/dev/fd/" + std::to_string(open_file), "rows");
  ::close(open_file);
  EXPECT_EQ(read(dir_ / "log"), "rows");
}

TEST_F(OutputFiles, KnowsTheStandardOutput) {
  std::filesystem::create_symlink("/dev/stdout", dir_ / "out");
  for (const Path& name : {Path("-"), Path("/dev/stdout"), Path("/dev/fd/1"), dir_ / "out"})
    EXPECT_TRUE(is_standard_output(name)) << name;
  EXPECT_FALSE(is_standard_output(dir_ / "a"));
  EXPECT_THROW(OutputFile(dir_.path()), FileError);
}

}  // namespace
}  // namespace heddle::files
