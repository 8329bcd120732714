#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

/// Abilities of the terminal, and text measured as it shows it.
namespace heddle::ui {

/// Whether the descriptor (1 standard output, 2 standard error) is a terminal that understands
/// cursor movement.
bool is_terminal(int descriptor);
/// Columns of the terminal, or 80 where there is none to ask.
int terminal_width(int descriptor);
/// Colour is used on a terminal, unless NO_COLOR is set and not empty (no-color.org).
bool uses_color(int descriptor);

/// Columns that a UTF-8 text takes: escape sequences and combining marks none, East Asian wide
/// characters and emoji two.
int display_width(std::string_view text);
/// The longest start of `text` that takes at most `width` columns, ending in "…" if something was
/// cut.
std::string fit(std::string_view text, int width);
/// `text` in lines of at most `width` > 1 columns, broken at spaces where there are any. For text
/// without escape codes.
std::vector<std::string> wrap(std::string_view text, int width);
/// `text` with spaces on its right (or left) up to `width` columns.
std::string pad(std::string_view text, int width, bool is_right_aligned = false);

/// SGR escape codes ("Select Graphic Rendition", ECMA-48), so that every command uses the same few
/// colours.
enum class Color { kNone, kBold, kDim, kRed, kGreen, kYellow, kBlue, kMagenta, kCyan };
/// `text` in the colour; unchanged if !enabled.
std::string paint(std::string_view text, Color color, bool enabled);

/// One character of a UTF-8 text; an invalid byte counts as U+FFFD of one byte.
struct CodePoint {
  char32_t value;
  std::size_t bytes;
};
CodePoint decode_utf8(std::string_view text);

}  // namespace heddle::ui
