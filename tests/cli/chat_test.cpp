// heddle chat with lines on the standard input.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <iostream>

#include "base/text.h"
#include "program.h"

namespace heddle::cli {
namespace {

using ::testing::HasSubstr;

class ChatCommand : public ::testing::Test {
 protected:
  /// A model without tied embeddings: one with them would repeat the prompt's last token.
  void SetUp() override {
    auto config = testing::small_config();
    config["tie_word_embeddings"] = false;
    f_.write("talker.json", config.dump());
    const Outcome made =
        run_command({"init", "--config", f_.at("talker.json"), "--tokenizer",
                     testing::source_path("examples/tokenizer-4k"), "--output", f_.at("talker")});
    ASSERT_EQ(made.status, 0) << made.err;
  }

  /// The answers to lines that are typed.
  Outcome chat(const std::string& lines, Arguments more = {}) const {
    Arguments arguments = {"chat",
                           f_.at("talker"),
                           "--threads",
                           "1",
                           "--stop",
                           "\n",
                           "--max-new-tokens",
                           "12",
                           "--temperature",
                           "0",
                           "--template-arg",
                           "enable_thinking=false"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    std::istringstream in(lines);
    std::streambuf* const terminal = std::cin.rdbuf(in.rdbuf());
    const Outcome outcome = run_command(arguments);
    std::cin.rdbuf(terminal);
    std::cin.clear();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return outcome;
  }
  std::vector<std::string> answers(const std::string& lines, Arguments more = {}) const {
    return text::split(chat(lines, std::move(more)).out, '\n');
  }

  Folder f_;
};

TEST_F(ChatCommand, AnswersAsGenerateDoes) {
  const Outcome generated = run_command(
      {"generate", f_.at("talker"), "--threads", "1", "--prompt", "the river", "--stop", "\n",
       "--max-new-tokens", "12", "--temperature", "0", "--template-arg", "enable_thinking=false"});
  ASSERT_EQ(generated.status, 0) << generated.err;
  EXPECT_EQ(chat("the river\n").out, generated.out);
}

TEST_F(ChatCommand, RemembersUntilItIsUndoneOrReset) {
  const auto said = answers(
      "the river\nthe hill\n/undo\nthe hill\n/reset\nthe river\nthe hill\n/undo\n/undo\nthe "
      "river\n");
  ASSERT_EQ(said.size(), 7);  // Six answers and what follows the last line break.
  EXPECT_EQ(said[2], said[1]);
  EXPECT_EQ(said[3], said[0]);
  EXPECT_EQ(said[4], said[1]);
  EXPECT_EQ(said[5], said[0]);
  // The answer depends on what was said before.
  EXPECT_NE(answers("the hill\n")[0], said[1]);
}

TEST_F(ChatCommand, SystemMessageIsAsTheOptionSetsIt) {
  const auto given = answers("the river\n", {"--system", "Be a pirate."});
  EXPECT_EQ(answers("/system Be a pirate.\nthe river\n")[0], given[0]);
  EXPECT_NE(answers("the river\n")[0], given[0]);
  EXPECT_EQ(answers("/system\nthe river\n", {"--system", "Be a pirate."})[0],
            answers("the river\n")[0]);
}

TEST_F(ChatCommand, LinesGoOnAfterABackslash) {
  EXPECT_EQ(answers("the river\\\nthe hill\n").size(), 2);
}

TEST_F(ChatCommand, UnknownCommandsAreSaidAndNotSent) {
  const Outcome outcome = chat("/rest\n");
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, HasSubstr("/rest: no such command; /help lists them"));
}

TEST_F(ChatCommand, TooLongAConversationEndsAScript) {
  std::istringstream in(std::string(400, 'x') + "\n");
  std::streambuf* const terminal = std::cin.rdbuf(in.rdbuf());
  const Outcome outcome =
      run_command({"chat", f_.at("talker"), "--threads", "1", "--context", "32"});
  std::cin.rdbuf(terminal);
  std::cin.clear();
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("--context N makes room"));
}

}  // namespace
}  // namespace heddle::cli
