#include "base/terminal_text.h"

#include <gtest/gtest.h>

#include <sstream>

namespace heddle::text {
namespace {

TEST(TerminalText, OnlyColoursReachTheTerminal) {
  for (const auto& [text, shown] : {
           std::pair{"a\tb\nc", "a\tb\nc"},
           std::pair{"\x1b[2J\x1b[H", "\\x1b[2J\\x1b[H"},
           std::pair{"\x1b]0;title\x07", "\\x1b]0;title\\x07"},
           std::pair{"\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m"},
           std::pair{"over\rwritten", "over\\x0dwritten"},
           std::pair{"of DOS\r\n", "of DOS\n"},
           std::pair{"\xc2\x9b"
                     "31m",
                     "\\x9b31m"},
           std::pair{"\xe2\x80\xaegnp", "\\u202egnp"},
           std::pair{"\xff\xfe", "\\xff\\xfe"},
           std::pair{"Grüße, 世界 🙂", "Grüße, 世界 🙂"},
           std::pair{"back\b\b\b\b", "back\\x08\\x08\\x08\\x08"},
       })
    EXPECT_EQ(shown_lines(text), shown) << shown;
}

TEST(TerminalText, PiecesGiveWhatTheWholeGives) {
  const std::string text =
      "Grüße, 世界 🙂\r\n\x1b[1;31mred\x1b[0m \x1b[2J\x1b[9\x1b]0;t\x07 \xe4\xb8 \xff\tend\r";
  for (std::size_t piece = 1; piece <= text.size(); ++piece) {
    std::ostringstream terminal;
    {
      TerminalBuffer buffer(*terminal.rdbuf());
      std::ostream out(&buffer);
      for (std::size_t at = 0; at < text.size(); at += piece)
        out << text.substr(at, piece) << std::flush;
      EXPECT_TRUE(out.good());
    }
    EXPECT_EQ(terminal.str(), shown_lines(text)) << piece;
  }
}

TEST(TerminalText, NoSequenceWaitsForEver) {
  // A model that never ends a sequence gets what it has begun shown.
  std::ostringstream terminal;
  TerminalBuffer buffer(*terminal.rdbuf());
  std::ostream out(&buffer);
  out << "\x1b[" << std::string(1000, '1');
  EXPECT_GT(terminal.str().size(), 900u);
  EXPECT_EQ(terminal.str().find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace heddle::text
