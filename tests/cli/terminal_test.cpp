// The program itself on a terminal of its own: what it prints of strangers' files and models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <termios.h>

#include <future>
#include <regex>

#include "program.h"

namespace heddle::cli {
namespace {

using ::testing::HasSubstr;

class OnATerminal : public ::testing::Test {
 protected:
  /// Bytes that the terminal gets from the command's standard output.
  std::string output_of(const Arguments& arguments) {
    int terminal = -1, other = -1;
    std::array<char, 128> name{};
    termios plain{};
    cfmakeraw(&plain);
    EXPECT_EQ(openpty(&terminal, &other, name.data(), &plain, nullptr), 0);
    const pid_t child = start(folder_, arguments, name.data());
    auto text = std::async(std::launch::async, [terminal] {
      std::string all;
      std::array<char, 4096> bytes{};
      for (ssize_t got = 0; (got = read(terminal, bytes.data(), bytes.size())) > 0;)
        all.append(bytes.data(), static_cast<std::size_t>(got));
      return all;
    });
    EXPECT_EQ(wait_for(child), 0) << message(folder_);
    close(other);  // the reader ends when nobody else has it open
    std::string all = text.get();
    close(terminal);
    return all;
  }

  /// The text without the colours that the program's own tables have.
  static std::string without_colors(const std::string& text) {
    return std::regex_replace(text, std::regex("\x1b\\[[0-9;]*m"), "");
  }

  Folder folder_;
};

TEST_F(OnATerminal, NothingForeignIsObeyed) {
  const std::string clear = "\x1b[2J", title = "\x1b]0;t\x07",
                    c1 = "\xc2\x9b"
                         "31m";
  folder_.write("rows" + clear + ".jsonl",
                R"({"text": "a\u001b[2J\u009b31m\u202egnp", "id": "\u009b2J"})"
                "\n");
  const std::string rows = folder_.at("rows" + clear + ".jsonl");
  const std::vector<Arguments> commands = {
      {"tokenize", "model.path=" + folder_.at("model"), "--input", rows},
      {"score", folder_.at("model"), "--input", rows, "--output", "-"},
      {"score", folder_.at("model"), "--input", rows, "--output", "/dev/stdout"},
      {"export", folder_.at("model"), "--output", folder_.at("copy" + title)},
      {"config", "train.output_dir=" + clear, "model.path=" + c1, "data.train=x"},
      {"generate", folder_.at("model"), "--prompt", "a", "--max-new-tokens", "400", "--temperature",
       "3", "--top-p", "1", "--top-k", "0", "--ignore-eos"},
      folder_.train({"train.output_dir=" + folder_.at("run" + title + c1)})};
  for (const Arguments& arguments : commands) {
    const std::string text = without_colors(output_of(arguments));
    EXPECT_FALSE(text.empty()) << arguments[0];
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      EXPECT_TRUE(byte >= 0x20 || c == '\n' || c == '\t') << arguments[0] << ": " << int{byte};
    }
    for (const char* sequence : {"\x7f", "\xc2\x9b", "\xe2\x80\xae"})
      EXPECT_THAT(text, Not(HasSubstr(sequence))) << arguments[0];
  }
}

TEST_F(OnATerminal, AFileGetsTheBytes) {
  EXPECT_EQ(wait_for(start(folder_,
                           {"export", folder_.at("model"), "--output", folder_.at("copy\x1b[2J")})),
            0);
  EXPECT_THAT(files::read(folder_.at("stdout")), HasSubstr("copy\x1b[2J"));
}

}  // namespace
}  // namespace heddle::cli
