#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// Methods of Python's str, on valid UTF-8. Positions and lengths count code points.
namespace heddle::data::jinja::python_text {

bool is_space(char32_t c);
/// True if the character at byte `at` is white space.
bool is_space_at(std::string_view text, std::size_t at);

/// `chars` absent: white space.
std::string_view strip_left(std::string_view text, std::optional<std::string_view> chars = {});
std::string_view strip_right(std::string_view text, std::optional<std::string_view> chars = {});
std::string_view strip(std::string_view text, std::optional<std::string_view> chars = {});

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);
std::string title(std::string_view text);
std::string swapcase(std::string_view text);

/// `separator` absent: runs of white space. `most` < 0: no limit. From the right if asked.
std::vector<std::string> split(std::string_view text, std::optional<std::string_view> separator,
                               std::int64_t most, bool from_right);
std::vector<std::string> split_lines(std::string_view text, bool keep_ends);
/// `most` < 0: all. An empty `from` stands between all characters.
std::string replace(std::string_view text, std::string_view from, std::string_view to,
                    std::int64_t most);

/// The predicates isdigit, isalpha, ...: every character has the property and there is one.
enum class Property { kAlpha, kDecimal, kDigit, kNumeric, kAlnum, kSpace, kAscii };
bool all(std::string_view text, Property property);
/// There is a cased character and all of them are lower (upper) case.
bool is_lower(std::string_view text);
bool is_upper(std::string_view text);
bool is_title(std::string_view text);

std::u32string to_code_points(std::string_view text);
std::string from_code_points(std::u32string_view text);

/// repr(): quoted, with what does not print as escapes.
std::string quoted(std::string_view text);
/// repr() of a float: the shortest digits that read back as the same number.
std::string number(double value);

}  // namespace heddle::data::jinja::python_text
