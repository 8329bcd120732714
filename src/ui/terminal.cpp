#include "ui/terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>

namespace heddle::ui {
namespace {

struct Interval {
  char32_t first;
  char32_t last;
};

// Unicode Standard Annex 11 (East Asian Width, W and F), merged to blocks.
constexpr std::array<Interval, 14> kWide{{{0x1100, 0x115F},
                                          {0x231A, 0x231B},
                                          {0x23E9, 0x23EC},
                                          {0x2E80, 0x303E},
                                          {0x3041, 0x33FF},
                                          {0x3400, 0x4DBF},
                                          {0x4E00, 0xA4CF},
                                          {0xAC00, 0xD7A3},
                                          {0xF900, 0xFAFF},
                                          {0xFE30, 0xFE6F},
                                          {0xFF00, 0xFF60},
                                          {0x1F300, 0x1F64F},
                                          {0x1F900, 0x1FAFF},
                                          {0x20000, 0x3FFFD}}};
// Marks, joiners and variation selectors that take no column of their own.
constexpr std::array<Interval, 7> kZero{{{0x0300, 0x036F},
                                         {0x0483, 0x0489},
                                         {0x0591, 0x05BD},
                                         {0x200B, 0x200F},
                                         {0x20D0, 0x20FF},
                                         {0xFE00, 0xFE0F},
                                         {0xE0100, 0xE01EF}}};

template <std::size_t N>
bool holds(const std::array<Interval, N>& intervals, char32_t c) {
  return std::ranges::any_of(intervals,
                             [c](const Interval& i) { return c >= i.first && c <= i.last; });
}

int columns(char32_t c) {
  if (c < 0x20 || (c >= 0x7F && c < 0xA0) || holds(kZero, c)) return 0;
  return holds(kWide, c) ? 2 : 1;
}

/// Bytes of the escape sequence ESC [ ... letter that starts here, or 0.
std::size_t escape_length(std::string_view text) {
  if (!text.starts_with("\x1b[")) return 0;
  std::size_t end = 2;
  while (end < text.size() && (text[end] < '@' || text[end] > '~')) ++end;
  return std::min(end + 1, text.size());
}

}  // namespace

bool is_terminal(int descriptor) {
  if (isatty(descriptor) == 0) return false;
  const char* kind = std::getenv("TERM");
  return kind != nullptr && std::string_view(kind) != "dumb";
}

int terminal_width(int descriptor) {
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

bool uses_color(int descriptor) {
  const char* refused = std::getenv("NO_COLOR");
  return (refused == nullptr || *refused == '\0') && is_terminal(descriptor);
}

CodePoint decode_utf8(std::string_view text) {
  constexpr CodePoint kInvalid{0xFFFD, 1};
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < length) return kInvalid;
  char32_t value = lead & (0xFF >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return kInvalid;
    value = value << 6 | (byte(i) & 0x3F);
  }
  constexpr std::array<char32_t, 5> kShortest = {0, 0, 0x80, 0x800, 0x10000};
  if (value < kShortest[length] || value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
    return kInvalid;
  }
  return {value, length};
}

int display_width(std::string_view text) {
  int width = 0;
  while (!text.empty()) {
    if (const std::size_t escape = escape_length(text)) {
      text.remove_prefix(escape);
      continue;
    }
    const CodePoint c = decode_utf8(text);
    width += columns(c.value);
    text.remove_prefix(c.bytes);
  }
  return width;
}

std::string fit(std::string_view text, int width) {
  if (display_width(text) <= width) return std::string(text);
  std::string out;
  int used = 0;
  bool has_escape = false;
  while (!text.empty()) {
    std::size_t bytes = escape_length(text);
    if (bytes > 0) {
      has_escape = true;
    } else {
      const CodePoint c = decode_utf8(text);
      bytes = c.bytes;
      used += columns(c.value);
    }
    if (used > width - 1) break;
    out += text.substr(0, bytes);
    text.remove_prefix(bytes);
  }
  if (width > 0) out += "…";
  return has_escape ? out + "\x1b[0m" : out;
}

std::vector<std::string> wrap(std::string_view text, int width) {
  std::vector<std::string> lines;
  while (display_width(text) > width) {
    std::size_t end = 0, space = 0;
    for (int used = 0; end < text.size();) {
      const CodePoint c = decode_utf8(text.substr(end));
      used += columns(c.value);
      if (used > width && end > 0) break;
      end += c.bytes;
      if (end < text.size() && text[end] == ' ') space = end;
    }
    if (space > 0) end = space;
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + (space > 0 ? 1 : 0), text.size()));
  }
  if (!text.empty() || lines.empty()) lines.emplace_back(text);
  return lines;
}

std::string pad(std::string_view text, int width, bool is_right_aligned) {
  const std::string space(static_cast<std::size_t>(std::max(0, width - display_width(text))), ' ');
  return is_right_aligned ? space + std::string(text) : std::string(text) + space;
}

std::string paint(std::string_view text, Color color, bool enabled) {
  constexpr std::array<int, 9> kCodes = {0, 1, 2, 31, 32, 33, 34, 35, 36};
  if (!enabled || color == Color::kNone || text.empty()) return std::string(text);
  return fmt::format("\x1b[{}m{}\x1b[0m", kCodes[static_cast<std::size_t>(color)], text);
}

}  // namespace heddle::ui
