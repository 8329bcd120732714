// The program itself where whoever reads its output leaves, where files may not grow, and where its
// folder is gone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "cli/application.h"
#include "program.h"

namespace heddle::cli {
namespace {

using ::testing::HasSubstr;

/// The status of a line of bash, in which HEDDLE stands for the command; 128 + N: ended by signal
/// N.
int status_of(std::string line, const Arguments& arguments) {
  Arguments words = arguments;
  const std::string command =
      "'" + testing::heddle_program() + "'" + quote_command(words).substr(std::strlen("heddle"));
  for (std::size_t at = line.find("HEDDLE"); at != std::string::npos; at = line.find("HEDDLE"))
    line.replace(at, std::strlen("HEDDLE"), command);
  const pid_t child = fork();
  if (child == 0) {
    execlp("bash", "bash", "-c", line.c_str(), nullptr);
    _exit(127);
  }
  return wait_for(child);
}

TEST(LeavingReaders, EndNoTraining) {
  const Folder folder;
  for (const char* line : {"HEDDLE 2> /dev/null | true; exit ${PIPESTATUS[0]}",
                           "HEDDLE 2>&1 > /dev/null | true; exit ${PIPESTATUS[0]}",
                           "HEDDLE 2>&1 | true; exit ${PIPESTATUS[0]}",
                           "HEDDLE 2>&1 | head -c 10 > /dev/null; exit ${PIPESTATUS[0]}",
                           "HEDDLE 2> /dev/null | head -n 1 > /dev/null; exit ${PIPESTATUS[0]}",
                           "exec HEDDLE 2>&-", "exec HEDDLE >&- 2>&-"}) {
    // Output that nobody reads is an error, when all is done.
    EXPECT_LE(status_of(line, folder.train()), 1) << line;
    EXPECT_TRUE(fs::exists(folder.at("run/final/model.safetensors"))) << line;
    fs::remove_all(folder.at("run"));
  }
}

TEST(FileSizes, ALimitIsAnErrorWithTheFilesNameAndNoSignal) {
  const Folder folder;
  const auto limited = [&](const std::string& kib) {
    // The message goes through a pipe: a file could not grow either.
    return status_of("(ulimit -f " + kib + "; exec HEDDLE 2>&1 > /dev/null) | cat > '" +
                         folder.at("stderr") + "'; exit ${PIPESTATUS[0]}",
                     folder.train({"ckpt.every=1"}));
  };
  for (const char* kib : {"0", "1", "20", "300"}) {
    EXPECT_EQ(limited(kib), 1) << kib;
    EXPECT_THAT(message(folder), HasSubstr("File too large")) << kib;
    EXPECT_FALSE(fs::exists(folder.at("run/final"))) << kib;
  }
  EXPECT_EQ(limited("unlimited"), 0) << message(folder);
  EXPECT_TRUE(fs::exists(folder.at("run/final/model.safetensors")));
}

TEST(WorkingFolder, OneThatIsGoneIsNamed) {
  const Folder folder;
  const std::string gone = folder.at("gone");
  EXPECT_EQ(status_of("mkdir '" + gone + "'; cd '" + gone + "'; rmdir '" + gone + "'; HEDDLE 2> '" +
                          folder.at("stderr") + "'",
                      {"--version"}),
            2);
  EXPECT_EQ(files::read(folder.at("stderr")),
            "error: the working folder is gone: change to one that is there\n");
}

}  // namespace
}  // namespace heddle::cli
