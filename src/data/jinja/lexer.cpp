#include "data/jinja/lexer.h"

#include <algorithm>
#include <charconv>

#include "base/errors.h"
#include "data/jinja/python_text.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data::jinja {
namespace {

using Type = Token::Type;

std::string normalize_line_ends(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      if (i + 1 < source.size() && source[i + 1] == '\n') continue;
      out += '\n';
    } else {
      out += source[i];
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}
bool is_name(char c) { return is_name_start(c) || is_digit(c); }

class Lexer {
 public:
  Lexer(std::string source, const std::string& name) : source_(std::move(source)), name_(name) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) root();
    add(Type::kEnd, "");
    return std::move(tokens_);
  }

 private:
  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw_error<DataError>("{}:{}: {}", name_, line_,
                           fmt::format(format, std::forward<Args>(args)...));
  }
  bool looking_at(std::string_view what) const {
    return std::string_view(source_).substr(at_).starts_with(what);
  }
  char peek(std::size_t ahead = 0) const {
    return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0';
  }
  void add(Type type, std::string text) { tokens_.push_back({type, line_, std::move(text)}); }
  /// Moves on and counts the lines.
  void advance(std::size_t to) {
    line_ += static_cast<int>(std::count(source_.begin() + at_, source_.begin() + to, '\n'));
    at_ = to;
  }
  void skip_space() {
    std::size_t to = at_;
    while (to < source_.size() && python_text::is_space_at(source_, to))
      to += utf8::decode(source_, to).bytes;
    advance(to);
  }

  /// Text up to the next tag, and the tag.
  void root() {
    std::size_t tag = at_;
    for (;; ++tag) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos || tag + 1 >= source_.size()) {
        text(source_.size(), false, '\0');
        return;
      }
      const char next = source_[tag + 1];
      if (next == '{' || next == '%' || next == '#') break;
    }
    const char kind = source_[tag + 1];
    char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    if (sign != '-' && sign != '+') sign = '\0';
    text(tag, kind != '{', sign);
    const std::size_t inside = tag + 2 + (sign != '\0');
    if (kind == '#') {
      comment(inside);
    } else if (kind == '%' && is_raw(inside)) {
      raw();
    } else {
      add(kind == '%' ? Type::kBlockBegin : Type::kVariableBegin, "");
      advance(inside);
      expression(kind == '%');
    }
  }

  void text(std::size_t end, bool is_block, char sign) {
    std::string_view data = std::string_view(source_).substr(at_, end - at_);
    if (sign == '-') {
      data = python_text::strip_right(data);
    } else if (sign == '\0' && is_block) {
      const std::size_t line_begin = data.rfind('\n') + 1;  // 0 if there is none
      if ((line_begin > 0 || line_starts_) && python_text::strip(data.substr(line_begin)).empty()) {
        data = data.substr(0, line_begin);
      }
    }
    if (!data.empty()) add(Type::kData, std::string(data));
    advance(end);
  }

  /// After the closing mark of a block or comment: the white space that goes with it.
  void close(std::size_t mark, char sign, bool trims_line_end) {
    advance(mark);
    if (sign == '-') {
      skip_space();
    } else if (sign != '+' && trims_line_end && peek() == '\n') {
      advance(at_ + 1);
    }
    line_starts_ = at_ > 0 && source_[at_ - 1] == '\n';
  }

  void comment(std::size_t inside) {
    const std::size_t end = source_.find("#}", inside);
    if (end == std::string::npos) fail("comment that does not end");
    const char sign = end > inside ? source_[end - 1] : '\0';
    close(end + 2, sign, true);
  }

  /// True if the block that begins before `at` is {% raw %}; then raw_begin_ and raw_end_ tell
  /// where its text lies.
  bool is_raw(std::size_t at) {
    std::size_t i = skip_ascii_space(at);
    if (source_.compare(i, 3, "raw") != 0) return false;
    i = skip_ascii_space(i + 3);
    raw_strips_ = i < source_.size() && source_[i] == '-';
    if (raw_strips_) ++i;
    if (source_.compare(i, 2, "%}") != 0) return false;
    raw_begin_ = i + 2;
    return true;
  }
  std::size_t skip_ascii_space(std::size_t i) const {
    while (i < source_.size() &&
           std::string_view(" \t\n\v\f\r").find(source_[i]) != std::string_view::npos)
      ++i;
    return i;
  }

  void raw() {
    advance(raw_begin_);
    if (raw_strips_) skip_space();
    line_starts_ = at_ > 0 && source_[at_ - 1] == '\n';
    for (std::size_t tag = source_.find("{%", at_); tag != std::string::npos;
         tag = source_.find("{%", tag + 1)) {
      std::size_t i = tag + 2;
      const char sign =
          i < source_.size() && (source_[i] == '-' || source_[i] == '+') ? source_[i] : '\0';
      i = skip_ascii_space(i + (sign != '\0'));
      if (source_.compare(i, 6, "endraw") != 0) continue;
      i = skip_ascii_space(i + 6);
      const char end_sign =
          i < source_.size() && (source_[i] == '-' || source_[i] == '+') ? source_[i] : '\0';
      if (end_sign != '\0') ++i;
      if (source_.compare(i, 2, "%}") != 0) continue;
      text(tag, true, sign);
      close(i + 2, end_sign, true);
      return;
    }
    fail("{{% raw %}} block that does not end");
  }

  /// Tokens up to the end of a block or of a {{ }}.
  void expression(bool is_block) {
    const std::string_view end = is_block ? "%}" : "}}";
    std::string open;  // brackets that wait to be closed
    for (;;) {
      skip_space();
      if (at_ >= source_.size()) fail("'{}' is missing at the end of the template", end);
      if (open.empty()) {
        const char c = peek();
        const bool has_sign = c == '-' || (c == '+' && is_block);
        if (source_.compare(at_ + has_sign, 2, end) == 0) {
          const std::size_t after = at_ + has_sign + 2;
          add(is_block ? Type::kBlockEnd : Type::kVariableEnd, "");
          close(after, has_sign ? c : '\0', is_block);
          return;
        }
      }
      const char c = peek();
      if (is_digit(c)) {
        number();
      } else if (is_name_start(c)) {
        std::size_t to = at_;
        while (to < source_.size() && is_name(source_[to])) ++to;
        add(Type::kName, source_.substr(at_, to - at_));
        advance(to);
      } else if (c == '\'' || c == '"') {
        string(c);
      } else {
        op(open);
      }
    }
  }

  void op(std::string& open) {
    for (const std::string_view two : {"//", "**", "==", "!=", ">=", "<="}) {
      if (looking_at(two)) {
        add(Type::kOperator, std::string(two));
        advance(at_ + 2);
        return;
      }
    }
    const char c = peek();
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == std::string_view::npos) {
      fail("unexpected character '{}'",
           std::string_view(source_).substr(at_, utf8::decode(source_, at_).bytes));
    }
    if (c == '(' || c == '[' || c == '{') open += c == '(' ? ')' : c == '[' ? ']' : '}';
    if (c == ')' || c == ']' || c == '}') {
      if (open.empty()) fail("unexpected '{}'", c);
      if (open.back() != c) fail("unexpected '{}', expected '{}'", c, open.back());
      open.pop_back();
    }
    add(Type::kOperator, std::string(1, c));
    advance(at_ + 1);
  }

  /// Digits with single underscores between them, from `i` on.
  std::size_t digits(std::size_t i, std::string& out) const {
    while (i < source_.size()) {
      if (is_digit(source_[i])) {
        out += source_[i++];
      } else if (source_[i] == '_' && i + 1 < source_.size() && is_digit(source_[i + 1]) &&
                 !out.empty()) {
        ++i;
      } else {
        break;
      }
    }
    return i;
  }

  void number() {
    int base = 10;
    if (peek() == '0' && (peek(1) | 0x20) == 'x') base = 16;
    if (peek() == '0' && (peek(1) | 0x20) == 'o') base = 8;
    if (peek() == '0' && (peek(1) | 0x20) == 'b') base = 2;
    std::string text;
    std::size_t to;
    bool is_float = false;
    if (base != 10) {
      to = at_ + 2;
      while (to < source_.size() &&
             (std::isxdigit(static_cast<unsigned char>(source_[to])) || source_[to] == '_')) {
        if (source_[to] != '_') text += source_[to];
        ++to;
      }
    } else {
      to = digits(at_, text);
      const bool after_dot =
          at_ > 0 && source_[at_ - 1] == '.';  // the 0 of `messages.0.role` is an index
      std::string fraction, exponent;
      std::size_t end = to;
      if (!after_dot && to + 1 < source_.size() && source_[to] == '.' &&
          is_digit(source_[to + 1])) {
        end = digits(to + 1, fraction);
      }
      if (!after_dot && end < source_.size() && (source_[end] | 0x20) == 'e') {
        std::size_t i = end + 1;
        std::string sign;
        if (i < source_.size() && (source_[i] == '+' || source_[i] == '-')) sign = source_[i++];
        const std::size_t after = digits(i, exponent);
        if (!exponent.empty()) {
          exponent = (sign == "-" ? "-" : "") + exponent;
          end = after;
        }
      }
      if (end != to) {
        is_float = true;
        if (!fraction.empty()) text += "." + fraction;
        if (!exponent.empty()) text += "e" + exponent;
        to = end;
      }
    }
    Token token{is_float ? Type::kFloat : Type::kInteger, line_, source_.substr(at_, to - at_)};
    const char* begin = text.data();
    const char* end = begin + text.size();
    const auto result = is_float ? std::from_chars(begin, end, token.real)
                                 : std::from_chars(begin, end, token.integer, base);
    if (result.ec != std::errc() || result.ptr != end)
      fail("the number {} cannot be read", token.text);
    tokens_.push_back(std::move(token));
    advance(to);
  }

  void string(char quote) {
    std::size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail("string that does not end");
    std::string value;
    for (std::size_t i = at_ + 1; i < end;) {
      if (source_[i] != '\\') {
        value += source_[i++];
      } else {
        i = escape(i, value);
      }
    }
    add(Type::kString, std::move(value));
    advance(end + 1);
  }

  /// Appends what the escape at `i` stands for (Python's rules; an unknown one stays as it is).
  std::size_t escape(std::size_t i, std::string& out) const {
    const char c = source_[i + 1];
    constexpr std::string_view kNames = "abfnrtv\\'\"";
    constexpr std::string_view kValues = "\a\b\f\n\r\t\v\\'\"";
    if (const std::size_t at = kNames.find(c); at != std::string_view::npos) {
      out += kValues[at];
      return i + 2;
    }
    if (c == '\n') return i + 2;
    const auto code_point = [&](std::size_t begin, std::size_t most, std::size_t least, int base) {
      std::uint32_t code = 0;
      std::size_t length = 0;
      while (length < most && begin + length < source_.size()) {
        const char digit = source_[begin + length];
        const int value = is_digit(digit) ? digit - '0'
                          : std::isxdigit(static_cast<unsigned char>(digit)) && base == 16
                              ? (digit | 0x20) - 'a' + 10
                              : base;
        if (value >= base) break;
        code = code * static_cast<std::uint32_t>(base) + static_cast<std::uint32_t>(value);
        ++length;
      }
      if (length < least) fail("escape \\{} needs {} digits", c, least);
      if (code > 0x10FFFF || (code >= 0xD800 && code < 0xE000))
        fail("escape \\{} is not a character", c);
      utf8::append(out, code);
      return begin + length;
    };
    if (c == 'x') return code_point(i + 2, 2, 2, 16);
    if (c == 'u') return code_point(i + 2, 4, 4, 16);
    if (c == 'U') return code_point(i + 2, 8, 8, 16);
    if (c >= '0' && c <= '7') return code_point(i + 1, 3, 1, 8);
    if (c == 'N') fail("the escape \\N{{...}} is not supported");
    out += '\\';
    return i + 1;
  }

  std::string source_;
  const std::string& name_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool line_starts_ = true;
  std::size_t raw_begin_ = 0;
  bool raw_strips_ = false;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source, const std::string& name) {
  if (utf8::valid_prefix(source) != source.size()) {
    throw_error<DataError>("{}: the template is not valid UTF-8 at byte {}", name,
                           utf8::valid_prefix(source));
  }
  return Lexer(normalize_line_ends(source), name).run();
}

}  // namespace heddle::data::jinja
