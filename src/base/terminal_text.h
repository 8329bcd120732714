#pragma once

#include <cstddef>
#include <streambuf>
#include <string>
#include <string_view>

namespace heddle::text {

/// A line as a terminal may get it: shown(), but for colours ("\x1b[1;31m"), which stay.
std::string shown_line(std::string_view line, std::size_t limit = std::string::npos);

/// Text of several lines for a terminal: line breaks and tabs stay, each line is as shown_line()
/// makes it.
std::string shown_lines(std::string_view text);

/// Stands before the buffer of a stream that leads to a terminal: what a model or a file says is
/// written as shown_lines() makes it, also when it comes in pieces.
class TerminalBuffer : public std::streambuf {
 public:
  explicit TerminalBuffer(std::streambuf& terminal) : terminal_(terminal) {}
  ~TerminalBuffer() override;

 protected:
  int_type overflow(int_type byte) override;
  std::streamsize xsputn(const char* bytes, std::streamsize count) override;
  int sync() override;

 private:
  bool put(std::string_view text);

  std::streambuf& terminal_;
  std::string begun_;  ///< The start of a character or colour whose rest is still to come.
};

}  // namespace heddle::text
