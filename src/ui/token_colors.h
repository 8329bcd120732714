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

/// The text of the tokens, their borders and which carry loss.
/// With colour: loss green, none dim, special tokens magenta; every second token underlined, so
/// that borders show. Without: tokens are separated by "|", runs that carry loss stand between "[["
/// and "]]". A line break is shown as "\n" and then breaks the line.
std::string render_tokens(std::span<const TokenText> tokens, bool has_color);
/// Meaning of the colours (or brackets), in one line.
std::string token_legend(bool has_color);

}  // namespace heddle::ui
