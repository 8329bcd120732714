#include "base/terminal_text.h"

#include <algorithm>

#include "base/quote.h"

namespace heddle::text {
namespace {

/// No colour and no character is longer.
constexpr std::size_t kLongestUnit = 24;

/// Bytes of the colour that `text` begins with, 0 for anything else: the only thing that a terminal
/// may be told.
std::size_t color_bytes(std::string_view text) {
  if (!text.starts_with("\x1b[")) return 0;
  const std::size_t end = text.find_first_not_of("0123456789;", 2);
  return end < text.size() && text[end] == 'm' ? end + 1 : 0;
}

/// Whether more bytes may make a whole colour, line break or character of the last ones.
bool is_begun(std::string_view tail) {
  const auto first = static_cast<unsigned char>(tail[0]);
  if (first == '\x1b') {
    return tail.size() == 1 ||
           (tail[1] == '[' && tail.find_first_not_of("0123456789;", 2) == std::string_view::npos);
  }
  if (first == '\r') return tail.size() == 1;
  const std::size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 1;
  return tail.size() < bytes && std::ranges::all_of(tail.substr(1), [](unsigned char next) {
           return (next & 0xc0) == 0x80;
         });
}

/// Where the last bytes begin that are not whole yet; the size if all are.
std::size_t whole_bytes(std::string_view text) {
  const std::size_t most = std::min(text.size(), kLongestUnit);
  for (std::size_t count = most; count > 0; --count)
    if (is_begun(text.substr(text.size() - count))) return text.size() - count;
  return text.size();
}

}  // namespace

std::string shown_line(std::string_view line, std::size_t limit) {
  std::string out;
  while (!line.empty()) {
    if (const std::size_t color = color_bytes(line)) {
      out += line.substr(0, color);
      line.remove_prefix(color);
      continue;
    }
    const std::string_view plain = line.substr(0, line.find('\x1b', 1));
    out += shown(plain, limit);
    line.remove_prefix(plain.size());
  }
  return out;
}

std::string shown_lines(std::string_view text) {
  std::string out;
  while (true) {
    const std::size_t end = text.find_first_of("\n\t");
    std::string_view line = text.substr(0, end);
    const bool is_line_end = end != std::string_view::npos && text[end] == '\n';
    if (is_line_end && line.ends_with('\r')) line.remove_suffix(1);
    out += shown_line(line);
    if (end == std::string_view::npos) return out;
    out += text[end];
    text.remove_prefix(end + 1);
  }
}

TerminalBuffer::~TerminalBuffer() {
  put(begun_);
  terminal_.pubsync();
}

bool TerminalBuffer::put(std::string_view text) {
  const std::string out = shown_lines(text);
  const auto count = static_cast<std::streamsize>(out.size());
  return terminal_.sputn(out.data(), count) == count;
}

TerminalBuffer::int_type TerminalBuffer::overflow(int_type byte) {
  if (traits_type::eq_int_type(byte, traits_type::eof())) return traits_type::not_eof(byte);
  const char text = traits_type::to_char_type(byte);
  return xsputn(&text, 1) == 1 ? byte : traits_type::eof();
}

std::streamsize TerminalBuffer::xsputn(const char* bytes, std::streamsize count) {
  begun_.append(bytes, static_cast<std::size_t>(count));
  const std::size_t whole = whole_bytes(begun_);
  if (!put(std::string_view(begun_).substr(0, whole))) return 0;
  begun_.erase(0, whole);
  return count;
}

int TerminalBuffer::sync() { return terminal_.pubsync(); }

}  // namespace heddle::text
