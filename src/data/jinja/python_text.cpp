#include "data/jinja/python_text.h"

#include <unicode/uchar.h>
#include <unicode/ustring.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/errors.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data::jinja::python_text {
namespace {

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

/// Runs one of ICU's case mappings, which may change the length.
template <class Map>
std::string map_case(std::string_view text, Map map) {
  const std::u32string code_points = to_code_points(text);
  std::u16string source;
  for (const char32_t c : code_points) {
    if (c < 0x10000) {
      source += static_cast<char16_t>(c);
    } else {
      source += static_cast<char16_t>(U16_LEAD(c));
      source += static_cast<char16_t>(U16_TRAIL(c));
    }
  }
  std::u16string result(source.size() * 3 + 8, u'\0');  // no mapping makes more than three of one
  UErrorCode status = U_ZERO_ERROR;
  const std::int32_t length = map(result.data(), static_cast<std::int32_t>(result.size()),
                                  source.data(), static_cast<std::int32_t>(source.size()), &status);
  if (U_FAILURE(status)) throw_error<InternalError>("ICU: case mapping: {}", u_errorName(status));
  std::string out;
  for (std::int32_t i = 0; i < length;) {
    UChar32 c;
    U16_NEXT(result.data(), i, length, c);
    utf8::append(out, static_cast<char32_t>(c));
  }
  return out;
}

bool is_cased(char32_t c) { return u_hasBinaryProperty(static_cast<UChar32>(c), UCHAR_CASED); }

bool contains(std::u32string_view set, char32_t c) {
  return set.find(c) != std::u32string_view::npos;
}

std::string title_character(std::string_view character) {
  const char32_t c = utf8::decode(character, 0).code_point;
  if (utf8::length(upper(character)) > 1) {  // the title case may be several characters too
    return map_case(character, [](char16_t* to, std::int32_t size, const char16_t* from,
                                  std::int32_t length, UErrorCode* status) {
      return u_strToTitle(to, size, from, length, nullptr, "", status);
    });
  }
  std::string out;
  utf8::append(out, static_cast<char32_t>(u_totitle(static_cast<UChar32>(c))));
  return out;
}

}  // namespace

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

bool is_space_at(std::string_view text, std::size_t at) {
  return is_space(utf8::decode(text, at).code_point);
}

std::string_view strip_left(std::string_view text, std::optional<std::string_view> chars) {
  const std::u32string set = chars ? to_code_points(*chars) : std::u32string();
  while (!text.empty()) {
    const utf8::Decoded first = utf8::decode(text, 0);
    if (chars ? !contains(set, first.code_point) : !is_space(first.code_point)) break;
    text.remove_prefix(first.bytes);
  }
  return text;
}

std::string_view strip_right(std::string_view text, std::optional<std::string_view> chars) {
  const std::u32string set = chars ? to_code_points(*chars) : std::u32string();
  while (!text.empty()) {
    const utf8::Decoded last = utf8::decode_before(text, text.size());
    if (chars ? !contains(set, last.code_point) : !is_space(last.code_point)) break;
    text.remove_suffix(last.bytes);
  }
  return text;
}

std::string_view strip(std::string_view text, std::optional<std::string_view> chars) {
  return strip_left(strip_right(text, chars), chars);
}

std::string upper(std::string_view text) {
  std::string out(text);
  if (is_ascii(text)) {
    for (char& c : out) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c;
    return out;
  }
  return map_case(
      text, [](char16_t* to, std::int32_t size, const char16_t* from, std::int32_t length,
               UErrorCode* status) { return u_strToUpper(to, size, from, length, "", status); });
}

std::string lower(std::string_view text) {
  std::string out(text);
  if (is_ascii(text)) {
    for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    return out;
  }
  return map_case(
      text, [](char16_t* to, std::int32_t size, const char16_t* from, std::int32_t length,
               UErrorCode* status) { return u_strToLower(to, size, from, length, "", status); });
}

std::string capitalize(std::string_view text) {
  if (text.empty()) return {};
  const std::size_t first = utf8::decode(text, 0).bytes;
  return title_character(text.substr(0, first)) + lower(text.substr(first));
}

std::string title(std::string_view text) {
  std::string out;
  bool after_cased = false;
  for (std::size_t at = 0; at < text.size();) {
    const utf8::Decoded next = utf8::decode(text, at);
    const std::string_view character = text.substr(at, next.bytes);
    out += after_cased ? lower(character) : title_character(character);
    after_cased = is_cased(next.code_point);
    at += next.bytes;
  }
  return out;
}

std::string swapcase(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const utf8::Decoded next = utf8::decode(text, at);
    const std::string_view character = text.substr(at, next.bytes);
    const auto code = static_cast<UChar32>(next.code_point);
    out += u_isUUppercase(code)   ? lower(character)
           : u_isULowercase(code) ? upper(character)
                                  : std::string(character);
    at += next.bytes;
  }
  return out;
}

std::vector<std::string> split(std::string_view text, std::optional<std::string_view> separator,
                               std::int64_t most, bool from_right) {
  std::vector<std::string> parts;
  const auto may_split = [&] { return most < 0 || static_cast<std::int64_t>(parts.size()) < most; };
  if (separator) {
    for (;;) {
      const std::size_t at = !may_split() ? std::string_view::npos
                             : from_right ? text.rfind(*separator)
                                          : text.find(*separator);
      if (at == std::string_view::npos) break;
      if (from_right) {
        parts.emplace_back(text.substr(at + separator->size()));
        text = text.substr(0, at);
      } else {
        parts.emplace_back(text.substr(0, at));
        text.remove_prefix(at + separator->size());
      }
    }
    parts.emplace_back(text);
  } else {
    for (;;) {
      text = from_right ? strip_right(text) : strip_left(text);
      if (text.empty()) break;
      if (!may_split()) {
        parts.emplace_back(from_right ? strip_right(text) : text);
        break;
      }
      std::size_t begin = 0, end = 0;
      if (from_right) {
        begin = end = text.size();
        while (begin > 0) {
          const utf8::Decoded before = utf8::decode_before(text, begin);
          if (is_space(before.code_point)) break;
          begin -= before.bytes;
        }
        parts.emplace_back(text.substr(begin));
        text = text.substr(0, begin);
      } else {
        while (end < text.size() && !is_space_at(text, end)) end += utf8::decode(text, end).bytes;
        parts.emplace_back(text.substr(0, end));
        text.remove_prefix(end);
      }
    }
  }
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string> lines;
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const utf8::Decoded next = utf8::decode(text, at);
    const char32_t c = next.code_point;
    std::size_t end = at + next.bytes;
    if ((c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 ||
        c == 0x2029) {
      if (c == '\r' && end < text.size() && text[end] == '\n') ++end;
      lines.emplace_back(text.substr(begin, (keep_ends ? end : at) - begin));
      begin = end;
    }
    at = end;
  }
  if (begin < text.size()) lines.emplace_back(text.substr(begin));
  return lines;
}

std::string replace(std::string_view text, std::string_view from, std::string_view to,
                    std::int64_t most) {
  std::string out;
  std::int64_t count = 0;
  std::size_t at = 0;
  if (from.empty()) {
    while (at < text.size() && (most < 0 || count < most)) {
      const std::size_t bytes = utf8::decode(text, at).bytes;
      out.append(to).append(text.substr(at, bytes));
      at += bytes;
      ++count;
    }
    if (at == text.size() && (most < 0 || count < most)) out += to;
    return out.append(text.substr(at));
  }
  while (most < 0 || count < most) {
    const std::size_t found = text.find(from, at);
    if (found == std::string_view::npos) break;
    out.append(text.substr(at, found - at)).append(to);
    at = found + from.size();
    ++count;
  }
  return out.append(text.substr(at));
}

bool all(std::string_view text, Property property) {
  if (text.empty()) return property == Property::kAscii;
  for (const char32_t c : to_code_points(text)) {
    const auto code = static_cast<UChar32>(c);
    const int type = u_charType(code);
    const bool alpha = type == U_UPPERCASE_LETTER || type == U_LOWERCASE_LETTER ||
                       type == U_TITLECASE_LETTER || type == U_MODIFIER_LETTER ||
                       type == U_OTHER_LETTER;
    const int numeric = u_getIntPropertyValue(code, UCHAR_NUMERIC_TYPE);
    bool has = false;
    switch (property) {
      case Property::kAlpha:
        has = alpha;
        break;
      case Property::kDecimal:
        has = numeric == U_NT_DECIMAL;
        break;
      case Property::kDigit:
        has = numeric == U_NT_DECIMAL || numeric == U_NT_DIGIT;
        break;
      case Property::kNumeric:
        has = numeric != U_NT_NONE;
        break;
      case Property::kAlnum:
        has = alpha || numeric != U_NT_NONE;
        break;
      case Property::kSpace:
        has = is_space(c);
        break;
      case Property::kAscii:
        has = c < 0x80;
        break;
    }
    if (!has) return false;
  }
  return true;
}

bool is_lower(std::string_view text) {
  bool cased = false;
  for (const char32_t c : to_code_points(text)) {
    const auto code = static_cast<UChar32>(c);
    if (u_isUUppercase(code) || u_istitle(code)) return false;
    cased |= static_cast<bool>(u_isULowercase(code));
  }
  return cased;
}

bool is_upper(std::string_view text) {
  bool cased = false;
  for (const char32_t c : to_code_points(text)) {
    const auto code = static_cast<UChar32>(c);
    if (u_isULowercase(code) || u_istitle(code)) return false;
    cased |= static_cast<bool>(u_isUUppercase(code));
  }
  return cased;
}

bool is_title(std::string_view text) {
  bool cased = false, previous = false;
  for (const char32_t c : to_code_points(text)) {
    const auto code = static_cast<UChar32>(c);
    if (u_isUUppercase(code) || u_istitle(code)) {
      if (previous) return false;
      previous = cased = true;
    } else if (u_isULowercase(code)) {
      if (!previous) return false;
      cased = true;
    } else {
      previous = false;
    }
  }
  return cased;
}

std::u32string to_code_points(std::string_view text) {
  std::u32string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const utf8::Decoded next = utf8::decode(text, at);
    out += next.code_point;
    at += next.bytes;
  }
  return out;
}

std::string from_code_points(std::u32string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char32_t c : text) utf8::append(out, c);
  return out;
}

std::string quoted(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  for (std::size_t at = 0; at < text.size();) {
    const utf8::Decoded next = utf8::decode(text, at);
    const char32_t c = next.code_point;
    if (c == static_cast<unsigned char>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c < 0x20 || c == 0x7F) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned>(c));
    } else if (c < 0x7F) {
      out += static_cast<char>(c);
    } else {
      const int type = u_charType(static_cast<UChar32>(c));
      const bool prints = type != U_UNASSIGNED && type != U_CONTROL_CHAR && type != U_FORMAT_CHAR &&
                          type != U_PRIVATE_USE_CHAR && type != U_SURROGATE &&
                          type != U_LINE_SEPARATOR && type != U_PARAGRAPH_SEPARATOR &&
                          type != U_SPACE_SEPARATOR;
      if (prints) {
        out += text.substr(at, next.bytes);
      } else if (c < 0x100) {
        out += fmt::format("\\x{:02x}", static_cast<unsigned>(c));
      } else if (c < 0x10000) {
        out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
      } else {
        out += fmt::format("\\U{:08x}", static_cast<unsigned>(c));
      }
    }
    at += next.bytes;
  }
  return out += quote;
}

std::string number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
  const std::string_view text(buffer, static_cast<std::size_t>(end - buffer));
  const std::size_t e = text.find('e');
  int exponent = 0;
  const std::size_t exponent_begin = e + 1 + (text[e + 1] == '+');
  std::from_chars(text.data() + exponent_begin, text.data() + text.size(), exponent);
  std::string digits;
  for (const char c : text.substr(0, e)) {
    if (c >= '0' && c <= '9') digits += c;
  }
  std::string out = value < 0 || std::signbit(value) ? "-" : "";
  // Python writes an exponent below 1e-4 and from 1e16 on.
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (digits.size() > 1) out += "." + digits.substr(1);
    return out + fmt::format("e{}{:02d}", exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0)
    return out + "0." + std::string(static_cast<std::size_t>(-exponent - 1), '0') + digits;
  const auto whole = static_cast<std::size_t>(exponent) + 1;
  if (digits.size() <= whole) return out + digits + std::string(whole - digits.size(), '0') + ".0";
  return out + digits.substr(0, whole) + "." + digits.substr(whole);
}

}  // namespace heddle::data::jinja::python_text
