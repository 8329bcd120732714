#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdio.h>

#include "base/files.h"
#include "base/text.h"
#include "cli/run_command.h"
#include "testing/temporary_directory.h"

namespace heddle::cli {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::vector<std::string> lines_of(const std::string& command, int& status) {
  FILE* pipe = popen(command.c_str(), "r");
  std::string out;
  char buffer[4096];
  while (const std::size_t count = fread(buffer, 1, sizeof buffer, pipe)) out.append(buffer, count);
  status = pclose(pipe);
  auto lines = text::split(out, '\n');
  std::erase(lines, "");
  return lines;
}

/// Words that bash would offer for the last of the words, in an empty folder.
std::vector<std::string> bash_completions(const std::string& words) {
  const testing::TemporaryDirectory dir;
  files::write_atomically(dir / "script", run_command({"completion", "bash"}).out);
  files::write_atomically(dir / "ask",
                          "source " + (dir / "script").string() +
                              "\nmkdir empty; cd empty; touch run.yaml\nCOMP_WORDS=(" + words +
                              ")\nCOMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n_heddle\nprintf '%s\\n' "
                              "\"${COMPREPLY[@]}\"\n");
  int status = 0;
  auto lines = lines_of("cd " + dir.path().string() + " && bash ask", status);
  EXPECT_EQ(status, 0);
  return lines;
}

TEST(Completion, BashOffersCommandsOptionsFilesAndKeys) {
  EXPECT_THAT(bash_completions("heddle con"), ElementsAre("config"));
  EXPECT_THAT(bash_completions("heddle ''"),
              ::testing::IsSupersetOf({"config", "doctor", "report"}));
  EXPECT_THAT(bash_completions("heddle config --ref"), ElementsAre("--reference"));
  EXPECT_THAT(bash_completions("heddle config run"), ElementsAre("run.yaml"));
  EXPECT_THAT(bash_completions("heddle config run.yaml optim.nam"), ElementsAre("optim.name="));
  EXPECT_THAT(bash_completions("heddle completion z"), ElementsAre("zsh"));
  EXPECT_THAT(bash_completions("heddle report optim.l"), IsEmpty());
}

TEST(Completion, BashOffersTypesAndDevices) {
  EXPECT_THAT(bash_completions("heddle generate --dtype b"), ElementsAre("bfloat16"));
  EXPECT_THAT(bash_completions("heddle launch -- score --device c"), ElementsAre("cpu", "cuda"));
  EXPECT_THAT(bash_completions("heddle sft device=n"), ElementsAre("device=npu"));
  EXPECT_THAT(bash_completions("heddle sft device.name=cu"), ElementsAre("device.name=cuda"));
}

TEST(Completion, BashOffersValuesOfKeysAndOptions) {
  // Words are cut as bash does, and whole where COMP_WORDBREAKS has no "=".
  EXPECT_THAT(bash_completions("heddle sft run.yaml optim.name = ad"), ElementsAre("adamw"));
  EXPECT_THAT(bash_completions("heddle sft run.yaml optim.name=ad"),
              ElementsAre("optim.name=adamw"));
  EXPECT_THAT(bash_completions("heddle sft run.yaml train.method ="), ElementsAre("full", "lora"));
  EXPECT_THAT(bash_completions("heddle sft data.train = ru"), ElementsAre("run.yaml"));
  EXPECT_THAT(bash_completions("heddle sft optim.lr = x"), IsEmpty());
  EXPECT_THAT(bash_completions("heddle init --preset small-1"), Contains("small-10m"));
  EXPECT_THAT(bash_completions("heddle export --head = c"), ElementsAre("classify"));
}

TEST(Completion, BashOffersMetricsAndHardware) {
  EXPECT_THAT(bash_completions("heddle eval M --metric lik"), ElementsAre("likelihood"));
  EXPECT_THAT(bash_completions("heddle eval M --metric num"), ElementsAre("numeric"));
  EXPECT_THAT(bash_completions("heddle doctor --hardware h2"), Contains("h200"));
}

TEST(Completion, BashGoesOnAfterLaunch) {
  EXPECT_THAT(bash_completions("heddle launch -- s"), ElementsAre("sft", "score"));
  EXPECT_THAT(bash_completions("heddle launch -- doc"), IsEmpty());
  EXPECT_THAT(bash_completions("heddle launch --np"), ElementsAre("--nproc"));
  EXPECT_THAT(bash_completions("heddle launch --nproc 2 -- sc"), ElementsAre("score"));
  EXPECT_THAT(bash_completions("heddle launch --nproc 2 -- sft run.yaml optim.nam"),
              ElementsAre("optim.name="));
  EXPECT_THAT(bash_completions("heddle launch --nproc 2 -- score --entr"),
              ElementsAre("--entropy"));
  EXPECT_THAT(bash_completions("heddle launch -- sft train.method = l"), ElementsAre("lora"));
}

TEST(Completion, ScriptsOfAllShellsNameEveryCommand) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const Outcome outcome = run_command({"completion", shell});
    EXPECT_EQ(outcome.status, 0);
    for (const char* word : {"config", "doctor", "report", "reference", "optim.lr="}) {
      EXPECT_THAT(outcome.out, HasSubstr(word)) << shell;
    }
  }
}

TEST(Completion, ScriptsParseWhereTheShellIsInstalled) {
  const testing::TemporaryDirectory dir;
  for (const std::string shell : {"bash", "zsh", "fish"}) {
    int status = 0;
    if (lines_of("command -v " + shell, status).empty()) continue;
    files::write_atomically(dir / "script", run_command({"completion", shell}).out);
    lines_of(shell + " -n " + (dir / "script").string() + " 2>&1", status);
    EXPECT_EQ(status, 0) << shell;
  }
}

}  // namespace
}  // namespace heddle::cli
