#include "ui/token_colors.h"

#include <fmt/format.h>

#include <algorithm>

namespace heddle::ui {
namespace {

/// Line breaks and control characters made visible; a line break then still breaks the line.
std::string visible(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\\n\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c == '\r') {
      out += "\\r";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

/// SGR codes: 32 green, 2 dim, 35 magenta, 1 bold, 4 underlined.
std::string style_of(const TokenText& token, bool is_odd) {
  std::string codes = token.is_special ? "35" : token.has_loss ? "32" : "2";
  if (token.is_special && token.has_loss) codes += ";1";
  if (is_odd) codes += ";4";
  return codes;
}

/// The escape codes end before each line break, so that a pager that cuts lines keeps the colours
/// apart.
std::string painted(const std::string& text, const std::string& codes) {
  std::string out;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    if (end > begin)
      out += fmt::format("\x1b[{}m{}\x1b[0m", codes, text.substr(begin, end - begin));
    if (end < text.size()) out += '\n';
    begin = end + 1;
  }
  return out;
}

}  // namespace

std::string TokenRenderer::add(const TokenText& token) {
  const std::string text = visible(token.text);
  std::string out;
  if (has_color_) {
    out = painted(text, style_of(token, is_odd_));
  } else {
    if (!is_first_ && token.has_loss == had_loss_ && is_line_begun_) out += '|';
    if (token.has_loss && !had_loss_) out += "[[";
    if (!token.has_loss && had_loss_) out += "]]";
    out += text;
  }
  is_first_ = false;
  is_odd_ = !is_odd_;
  had_loss_ = token.has_loss;
  if (!out.empty()) is_line_begun_ = !out.ends_with('\n');
  return out;
}

std::string TokenRenderer::finish() const {
  if (!has_color_ && had_loss_) return "]]\n";
  return is_line_begun_ ? "\n" : "";
}

std::string render_tokens(std::span<const TokenText> tokens, bool has_color) {
  TokenRenderer renderer(has_color);
  std::string out;
  for (const TokenText& token : tokens) out += renderer.add(token);
  return out + renderer.finish();
}

std::string token_legend(bool has_color) {
  if (!has_color) return "[[carries loss]]  no loss  token|border\n";
  return "\x1b[32mcarries loss\x1b[0m  \x1b[2mno loss\x1b[0m  \x1b[35mspecial\x1b[0m  "
         "\x1b[35;1mspecial with loss\x1b[0m  a\x1b[4mtoken\x1b[0mborder\n";
}

}  // namespace heddle::ui
