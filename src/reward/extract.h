#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

/// Finds the answer that a completion gives.
namespace heddle::reward {

enum class AnswerPlace {
  kWhole,     ///< All of the completion.
  kBoxed,     ///< The last balanced \boxed{...}.
  kHash,      ///< After the last "####", to the end of its line.
  kTag,       ///< Inside the last <answer>...</answer>.
  kLastLine,  ///< The last line that is not empty.
  kAuto,      ///< The first of kBoxed, kTag and kHash that is there.
};
/// "whole", "boxed", "hash", "tag", "last_line", "auto"; nothing for another name.
std::optional<AnswerPlace> answer_place(std::string_view name);

/// The last bytes of a completion, at most kBytesLookedAt, from the start of a character.
std::string_view looked_at(std::string_view completion);

/// Nothing if the place is not there. Reads looked_at(completion).
std::optional<std::string> extract(std::string_view completion, AnswerPlace place);

/// Text within the braces from text[open] == '{' on, or nothing if they are not closed. An escaped
/// brace ("\{") does not count.
std::optional<std::string_view> braced(std::string_view text, std::size_t open);

/// The text with U+FFFD for what is not UTF-8.
std::string valid_utf8(std::string_view text);

/// Valid UTF-8 in canonical composition (NFC), without white space at its ends; runs of spaces
/// stay. `ignore_case` folds case as Unicode does. Invalid bytes become U+FFFD.
std::string canonical(std::string_view text, bool ignore_case);

}  // namespace heddle::reward
