#pragma once

#include <span>
#include <string>

namespace heddle::ui {

/// One token of a rendered conversation.
struct TokenText {
  std::string text;  ///< its bytes as text; a control character is shown as an escape
  bool has_loss = false;
  bool is_special = false;
};

/// The text of tokens one after another, their borders and which carry loss.
/// With colour: loss green, none dim, special tokens magenta; every second token underlined, so
/// that borders show. Without: tokens are separated by "|", runs that carry loss stand between "[["
/// and "]]". A line break is shown as "\n" and then breaks the line.
class TokenRenderer {
 public:
  explicit TokenRenderer(bool has_color) : has_color_(has_color) {}
  /// Adds a token; returns the text that it adds.
  std::string add(const TokenText& token);
  /// Returns the end of the text: always a line break.
  std::string finish() const;

 private:
  bool has_color_, had_loss_ = false, is_odd_ = false, is_first_ = true;
  bool is_line_begun_ = true;  ///< The last addition is no line break.
};

/// All of TokenRenderer's text.
std::string render_tokens(std::span<const TokenText> tokens, bool has_color);
/// Meaning of the colours (or brackets), in one line.
std::string token_legend(bool has_color);

}  // namespace heddle::ui
