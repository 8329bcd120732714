#include "base/quote.h"

#include <algorithm>
#include <cstdint>

#include <fmt/format.h>

#include "base/utf8_character.h"

namespace heddle::text {
namespace {

/// Whether a terminal obeys the character, or shows the line in another order, instead of showing
/// it.
bool is_command(std::uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x200e || code == 0x200f ||
         (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069) || code == 0xfeff;
}

}  // namespace

std::string shown(std::string_view text, std::size_t limit) {
  std::string out;
  out.reserve(std::min(text.size(), limit) + 3);
  for (std::size_t at = 0; at < text.size();) {
    if (out.size() >= limit) return out + "...";
    std::uint32_t code = 0;
    const std::size_t bytes = character_bytes(text.substr(at), code);
    if (bytes == 0) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[at]));
    } else if (code == '\n') {
      out += "\\n";
    } else if (code == '\t') {
      out += "\\t";
    } else if (is_command(code)) {
      out += code < 0x100 ? fmt::format("\\x{:02x}", code) : fmt::format("\\u{:04x}", code);
    } else {
      out += text.substr(at, bytes);
    }
    at += std::max<std::size_t>(bytes, 1);
  }
  return out;
}

}  // namespace heddle::text
