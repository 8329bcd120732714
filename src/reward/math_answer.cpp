#include "reward/math_answer.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "base/text.h"
#include "reward/expression.h"
#include "reward/extract.h"
#include "reward/letters.h"

namespace heddle::reward {
namespace {

using Replacement = std::pair<std::string_view, std::string_view>;

/// Commands end where their letters do, so "\le" does not match in "\left". Longer ones first.
constexpr std::array<Replacement, 30> kCommands{{
    {"\\displaystyle", ""},
    {"\\limits", ""},
    {"\\left", ""},
    {"\\right", ""},
    {"\\bigl", ""},
    {"\\bigr", ""},
    {"\\Bigl", ""},
    {"\\Bigr", ""},
    {"\\big", ""},
    {"\\Big", ""},
    {"\\quad", " "},
    {"\\qquad", " "},
    {"\\dfrac", "\\frac"},
    {"\\tfrac", "\\frac"},
    {"\\cfrac", "\\frac"},
    {"\\leq", "\\le"},
    {"\\geq", "\\ge"},
    {"\\neq", "\\ne"},
    {"\\lbrace", "\\{"},
    {"\\rbrace", "\\}"},
    {"\\degree", ""},
    {"\\degrees", ""},
    {"\\circ", ""},
    {"\\cdots", "..."},
    {"\\ldots", "..."},
    {"\\dots", "..."},
    {"\\emptyset", "\\{\\}"},
    {"\\varnothing", "\\{\\}"},
    {"\\infin", "\\infty"},
    {"\\lt", "<"},
}};

constexpr std::array<Replacement, 34> kSigns{{
    {"^{\\circ}", ""},
    {"^\\circ", ""},
    {"\u00b0", ""},
    {"\\(", ""},
    {"\\)", ""},
    {"\\[", ""},
    {"\\]", ""},
    {"\\!", ""},
    {"\\,", " "},
    {"\\;", " "},
    {"\\:", " "},
    {"\\ ", " "},
    {"~", " "},
    {"\\$", ""},
    {"$", ""},
    {"\u2212", "-"},
    {"\u2013", "-"},
    {"\u00d7", "\\times "},
    {"\u00f7", "\\div "},
    {"\u00b7", "\\cdot "},
    {"\u03c0", "\\pi "},
    {"\u221a", "\\sqrt"},
    {"\u221e", "\\infty "},
    {"\u2264", "\\le "},
    {"\u2265", "\\ge "},
    {"\u2260", "\\ne "},
    {"\u222a", "\\cup "},
    {"\u00b2", "^2"},
    {"\u00b3", "^3"},
    {"\\%", "%"},
    {"\u00a0", " "},
    {"\n", " "},
    {"{,}", ","},
    {" percent", "%"},
}};

std::string with_replacements(std::string_view text) {
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view rest = text.substr(at);
    const auto sign = std::find_if(kSigns.begin(), kSigns.end(), [&](const Replacement& one) {
      return rest.starts_with(one.first);
    });
    if (sign != kSigns.end()) {
      result += sign->second;
      at += sign->first.size();
      continue;
    }
    if (rest[0] != '\\') {
      result += rest[0];
      ++at;
      continue;
    }
    std::size_t end = 1;
    while (end < rest.size() && is_letter(rest[end])) ++end;
    if (end == 1 && rest.size() > 1) end = 2;  // "\{"
    const std::string_view command = rest.substr(0, end);
    const auto known = std::find_if(kCommands.begin(), kCommands.end(),
                                    [&](const Replacement& one) { return one.first == command; });
    result += known == kCommands.end() ? command : known->second;
    at += end;
  }
  return result;
}

/// "\text{ cm}" becomes " cm ".
std::string without_text_commands(const std::string& text) {
  constexpr std::array<std::string_view, 8> kCommands{"\\text{",   "\\textbf{", "\\mathrm{",
                                                      "\\mbox{",   "\\mathbf{", "\\operatorname{",
                                                      "\\textrm{", "\\mathbb{"};
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view rest = std::string_view(text).substr(at);
    const auto command = std::find_if(kCommands.begin(), kCommands.end(),
                                      [&](std::string_view one) { return rest.starts_with(one); });
    const auto inside =
        command == kCommands.end() ? std::nullopt : braced(rest, command->size() - 1);
    if (!inside) {
      result += text[at++];
      continue;
    }
    result += " ";
    result += *inside;
    result += " ";
    at += command->size() + inside->size() + 1;
  }
  return result;
}

/// Removes spaces except between two letters or two digits, where they separate.
std::string with_few_spaces(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '\t' || c == '\r') continue;
    const bool needs = is_letter(c) || is_digit(c) || c == '\\';
    if (c != ' ' && result.size() > 1 && result.back() == ' ') {
      const char before = result[result.size() - 2];
      if (!needs || !(is_letter(before) || is_digit(before))) result.pop_back();
    }
    if (c == ' ' && (result.empty() || result.back() == ' ')) continue;
    result += c;
  }
  return std::string(text::trim(result));
}

/// "x=5" -> "5"; "f(x)=x^2" -> "x^2"; "x\in[1,2]" -> "[1,2]"; what has two equations stays.
std::string_view right_side(std::string_view text) {
  constexpr std::string_view kIn = "\\in";
  const std::string_view after = text.empty() ? text : text::trim(text.substr(1));
  if (is_letter(text.empty() ? ' ' : text[0]) && after.starts_with(kIn) &&
      after.size() > kIn.size() && !is_letter(after[kIn.size()])) {
    return text::trim(after.substr(kIn.size()));
  }
  const std::size_t at = text.find('=');
  if (at == std::string_view::npos || text.find('=', at + 1) != std::string_view::npos) return text;
  const std::string_view left = text::trim(text.substr(0, at));
  const bool is_name =
      !left.empty() && is_letter(left[0]) &&
      (left.size() == 1 || (left.size() == 4 && left[1] == '(' && left[3] == ')') ||
       (left.size() > 2 && left[1] == '_' && left.size() <= 6));
  return is_name ? text::trim(text.substr(at + 1)) : text;
}

/// The parts between separators that stand outside of every bracket.
std::vector<std::string_view> split_outside(std::string_view text, std::string_view separator) {
  std::vector<std::string_view> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}') --depth;
    if (depth == 0 && text.substr(at).starts_with(separator)) {
      parts.push_back(text::trim(text.substr(begin, at - begin)));
      begin = at + separator.size();
      at = begin - 1;
    }
  }
  parts.push_back(text::trim(text.substr(begin)));
  return parts;
}

/// Whether the bracket that opens the text is closed by its last character; "(a)(b)" is not. An
/// interval may close with the other kind.
bool is_enclosed(std::string_view text) {
  int depth = 0;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '(' || text[at] == '[') ++depth;
    if (text[at] == ')' || text[at] == ']') --depth;
    if (depth == 0) return at + 1 == text.size();
  }
  return false;
}

constexpr std::size_t kMostParts = 64;
constexpr int kMostNesting = 4;
/// Longer answers are compared byte by byte: no person wrote them, and lists of lists take the
/// square of their length.
constexpr std::size_t kLongestAnswer = 2000;

bool same(std::string_view a, std::string_view b, const Tolerance& tolerance, int nesting);

bool same_in_order(const std::vector<std::string_view>& a, const std::vector<std::string_view>& b,
                   const Tolerance& tolerance, int nesting) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(),
                                            [&](std::string_view left, std::string_view right) {
                                              return same(left, right, tolerance, nesting);
                                            });
}

/// Each part of one side has a partner of its own on the other.
bool same_in_any_order(const std::vector<std::string_view>& a, std::vector<std::string_view> b,
                       const Tolerance& tolerance, int nesting) {
  if (a.size() != b.size() || a.size() > kMostParts) return false;
  for (const std::string_view left : a) {
    const auto partner = std::find_if(b.begin(), b.end(), [&](std::string_view right) {
      return same(left, right, tolerance, nesting);
    });
    if (partner == b.end()) return false;
    b.erase(partner);
  }
  return true;
}

/// A number and the word after it ("5 cm", "12 square units").
struct Quantity {
  Number number;
  std::string unit;
};

/// Short words that are units; longer ones than three letters are words, because a product of so
/// many variables is rarer. One letter is a unit only after a space: "5x" is a product.
bool is_unit(std::string_view word) {
  constexpr std::array<std::string_view, 40> kShort{
      "cm",  "mm",  "km",  "dm", "nm",  "kg",  "mg",  "ml", "mL",  "ft", "in", "mi",  "yd",  "lb",
      "lbs", "oz",  "mph", "hr", "hrs", "min", "sec", "ms", "kmh", "kW", "Hz", "kHz", "MHz", "mol",
      "day", "deg", "rad", "m",  "g",   "s",   "h",   "L",  "J",   "N",  "W",  "V"};
  constexpr std::array<std::string_view, 7> kFunctions{"sin", "cos", "tan", "log",
                                                       "ln",  "exp", "sqrt"};
  if (std::find(kShort.begin(), kShort.end(), word) != kShort.end()) return true;
  return word.size() > 3 &&
         std::none_of(kFunctions.begin(), kFunctions.end(),
                      [&](std::string_view one) { return word.starts_with(one); });
}

std::optional<Quantity> quantity(std::string_view text) {
  const auto parsed = parse_number_at(text, 0);
  if (!parsed) return {};
  const std::string_view rest = text::trim(text.substr(parsed->end));
  if (rest.empty()) return Quantity{parsed->number, ""};
  const std::string_view word =
      rest.substr(0, std::find_if_not(rest.begin(), rest.end(), is_letter) - rest.begin());
  if (!is_unit(word) || (word.size() == 1 && text[parsed->end] != ' ')) return {};
  std::string unit;
  for (const char c : rest) {
    constexpr std::string_view kOthers = " /.^23{}-";
    if (!is_letter(c) && kOthers.find(c) == kOthers.npos) return {};
    if (is_letter(c) || c == '/' || is_digit(c)) unit += c;
  }
  if (unit.size() > 3 && unit.back() == 's') unit.pop_back();  // "meters" is "meter"
  return Quantity{parsed->number, unit};
}

std::optional<bool> same_structure(std::string_view a, std::string_view b,
                                   const Tolerance& tolerance, int nesting) {
  const auto both = [&](auto test) { return std::pair(test(a), test(b)); };
  const auto is_set = [](std::string_view text) {
    return text.starts_with("\\{") && text.ends_with("\\}") && text.find("\\}") + 2 == text.size();
  };
  const auto [set_a, set_b] = both(is_set);
  if (set_a && set_b) {
    return same_in_any_order(split_outside(a.substr(2, a.size() - 4), ","),
                             split_outside(b.substr(2, b.size() - 4), ","), tolerance, nesting);
  }
  if (a.find("\\cup") != a.npos || b.find("\\cup") != b.npos) {
    return same_in_any_order(split_outside(a, "\\cup"), split_outside(b, "\\cup"), tolerance,
                             nesting);
  }
  const auto has_brackets = [](std::string_view text) {
    return text.size() > 2 && (text[0] == '(' || text[0] == '[') && is_enclosed(text) &&
           split_outside(text.substr(1, text.size() - 2), ",").size() > 1;
  };
  const auto [brackets_a, brackets_b] = both(has_brackets);
  if (brackets_a && brackets_b) {
    return a.front() == b.front() && a.back() == b.back() &&
           same_in_order(split_outside(a.substr(1, a.size() - 2), ","),
                         split_outside(b.substr(1, b.size() - 2), ","), tolerance, nesting);
  }
  if (brackets_a != brackets_b || set_a != set_b) return false;
  const auto parts_of = [](std::string_view text) {
    return parse_number(text) ? std::vector<std::string_view>{text} : split_outside(text, ",");
  };
  const auto [parts_a, parts_b] = both(parts_of);
  if (parts_a.size() > 1 || parts_b.size() > 1)
    return same_in_any_order(parts_a, parts_b, tolerance, nesting);
  const auto [sides_a, sides_b] =
      both([](std::string_view text) { return split_outside(text, "="); });
  if (sides_a.size() == 2 && sides_b.size() == 2)
    return same_in_any_order(sides_a, sides_b, tolerance, nesting);
  if (sides_a.size() != sides_b.size()) return false;
  return {};
}

bool same(std::string_view a, std::string_view b, const Tolerance& tolerance, int nesting) {
  if (a == b) return true;
  if (a.empty() || b.empty() || nesting > kMostNesting) return false;
  if (const auto found = same_structure(a, b, tolerance, nesting + 1)) return *found;
  const auto left = quantity(a), right = quantity(b);
  if (left && right) {
    const bool fits = left->unit.empty() || right->unit.empty() || left->unit == right->unit;
    return fits && equal(left->number, right->number, tolerance);
  }
  // Words, which may look like products: "Yes" is "yes".
  const bool is_word = a.size() > 2 && std::all_of(a.begin(), a.end(), is_letter);
  if (is_word && canonical(a, true) == canonical(b, true)) return true;
  const auto first = Expression::parse(a), second = Expression::parse(b);
  if (first && second) return same_value(*first, *second, tolerance);
  return canonical(a, true) == canonical(b, true);
}

}  // namespace

std::string normalised_math(std::string_view answer) {
  std::string text = with_few_spaces(without_text_commands(with_replacements(text::trim(answer))));
  while (!text.empty() && (text.back() == '.' || text.back() == ' ')) text.pop_back();
  return std::string(right_side(text));
}

bool same_math(std::string_view a, std::string_view b, const Tolerance& tolerance) {
  if (a.size() > kLongestAnswer || b.size() > kLongestAnswer) return a == b;
  const std::string left = normalised_math(a), right = normalised_math(b);
  return !right.empty() && same(left, right, tolerance, 0);
}

}  // namespace heddle::reward
