#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

/// UTF-8 by RFC 3629: no surrogates, no overlong forms, nothing above U+10FFFF.
namespace heddle::data::utf8 {

constexpr char32_t kReplacement = 0xFFFD;

/// Length of the longest valid prefix of `text`, in bytes.
std::size_t valid_prefix(std::string_view text);

/// Each maximal invalid part (Unicode 15, section 3.9, as Python's errors="replace") becomes
/// U+FFFD.
std::string replace_invalid(std::string_view text);

/// Bytes at the end of `text` that begin a sequence which later bytes could complete; 0 to 3.
std::size_t incomplete_suffix(std::string_view text);

void append(std::string& out, char32_t code_point);

/// Code points in valid text.
std::size_t length(std::string_view text);

struct Decoded {
  char32_t code_point;
  std::uint32_t bytes;
};

/// The code point at `at` of valid text.
inline Decoded decode(std::string_view text, std::size_t at) {
  const auto* p = reinterpret_cast<const unsigned char*>(text.data()) + at;
  if (p[0] < 0x80) return {p[0], 1};
  if (p[0] < 0xE0) return {static_cast<char32_t>((p[0] & 0x1F) << 6 | (p[1] & 0x3F)), 2};
  if (p[0] < 0xF0) {
    return {static_cast<char32_t>((p[0] & 0x0F) << 12 | (p[1] & 0x3F) << 6 | (p[2] & 0x3F)), 3};
  }
  return {static_cast<char32_t>((p[0] & 0x07) << 18 | (p[1] & 0x3F) << 12 | (p[2] & 0x3F) << 6 |
                                (p[3] & 0x3F)),
          4};
}

/// The first place at or after `at` where a code point of valid text begins, or its end; `at` where
/// the text is shorter.
inline std::size_t boundary(std::string_view text, std::size_t at) {
  while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) ++at;
  return at;
}

/// The code point that ends just before `at` > 0 of valid text.
inline Decoded decode_before(std::string_view text, std::size_t at) {
  std::size_t begin = at - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return decode(text, begin);
}

}  // namespace heddle::data::utf8
