#pragma once

/// Letters and digits of ASCII, whatever the locale.
namespace heddle::reward {

constexpr bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace heddle::reward
