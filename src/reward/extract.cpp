#include "reward/extract.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <unicode/unorm2.h>
#include <unicode/ustring.h>

#include "base/errors.h"
#include "base/text.h"
#include "reward/verifiers.h"

namespace heddle::reward {
namespace {

/// Boxes that are looked through from the end for one that is closed.
constexpr int kBoxesTried = 16;

std::optional<std::string> last_boxed(std::string_view text) {
  std::size_t from = text.size();
  for (int tried = 0; tried < kBoxesTried && from > 0; ++tried) {
    const std::size_t at =
        std::max(text.rfind("\\boxed", from - 1) + 1, text.rfind("\\fbox", from - 1) + 1);
    if (at == 0) return {};
    from = at - 1;
    std::size_t open = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz", at);
    while (open < text.size() && text[open] == ' ') ++open;
    if (open >= text.size()) continue;
    if (text[open] == '{') {
      if (const auto inside = braced(text, open)) return std::string(*inside);
    } else if (text[open - 1] == ' ') {
      // "\boxed 5"
      return std::string(text.substr(open, text.find_first_of(" $\n", open) - open));
    }
  }
  return {};
}

std::optional<std::string> after_hash(std::string_view text) {
  const std::size_t at = text.rfind("####");
  if (at == std::string_view::npos) return {};
  text.remove_prefix(at + 4);
  return std::string(text::trim(text.substr(0, text.find('\n'))));
}

std::optional<std::string> in_tag(std::string_view text) {
  constexpr std::string_view kOpen = "<answer>", kClose = "</answer>";
  const std::size_t end = text.rfind(kClose);
  if (end == std::string_view::npos) return {};
  const std::size_t begin = text.rfind(kOpen, end);
  if (begin == std::string_view::npos) return {};
  return std::string(text::trim(text.substr(begin + kOpen.size(), end - begin - kOpen.size())));
}

std::optional<std::string> last_line(std::string_view text) {
  text = text::trim(text);
  const std::size_t at = text.rfind('\n');
  return std::string(text::trim(at == std::string_view::npos ? text : text.substr(at + 1)));
}

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

std::u16string to_utf16(std::string_view text) {
  std::u16string wide(text.size() + 1, u'\0');
  std::int32_t length = 0;
  UErrorCode status = U_ZERO_ERROR;
  constexpr UChar32 kReplacement = 0xFFFD;
  u_strFromUTF8WithSub(wide.data(), static_cast<std::int32_t>(wide.size()), &length, text.data(),
                       static_cast<std::int32_t>(text.size()), kReplacement, nullptr, &status);
  if (U_FAILURE(status)) throw_error<InternalError>("ICU: {}", u_errorName(status));
  wide.resize(static_cast<std::size_t>(length));
  return wide;
}

std::string to_utf8(const std::u16string& wide) {
  std::string text(wide.size() * 3 + 1, '\0');
  std::int32_t length = 0;
  UErrorCode status = U_ZERO_ERROR;
  u_strToUTF8(text.data(), static_cast<std::int32_t>(text.size()), &length, wide.data(),
              static_cast<std::int32_t>(wide.size()), &status);
  if (U_FAILURE(status)) throw_error<InternalError>("ICU: {}", u_errorName(status));
  text.resize(static_cast<std::size_t>(length));
  return text;
}

/// Calls a function of ICU that fills a buffer, with one of the room that it asks for.
template <class Fill>
std::u16string filled(std::size_t guess, Fill fill) {
  std::u16string result(guess, u'\0');
  for (int attempt = 0; attempt < 2; ++attempt) {
    UErrorCode status = U_ZERO_ERROR;
    const std::int32_t length =
        fill(result.data(), static_cast<std::int32_t>(result.size()), &status);
    const bool is_short = status == U_BUFFER_OVERFLOW_ERROR;
    if (!is_short && U_FAILURE(status)) throw_error<InternalError>("ICU: {}", u_errorName(status));
    result.resize(static_cast<std::size_t>(length));
    if (!is_short) break;
  }
  return result;
}

}  // namespace

std::optional<AnswerPlace> answer_place(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, AnswerPlace>, 6> kPlaces{{
      {"whole", AnswerPlace::kWhole},
      {"boxed", AnswerPlace::kBoxed},
      {"hash", AnswerPlace::kHash},
      {"tag", AnswerPlace::kTag},
      {"last_line", AnswerPlace::kLastLine},
      {"auto", AnswerPlace::kAuto},
  }};
  for (const auto& [known, place] : kPlaces) {
    if (known == name) return place;
  }
  return {};
}

std::string_view looked_at(std::string_view completion) {
  if (completion.size() <= kBytesLookedAt) return completion;
  completion.remove_prefix(completion.size() - kBytesLookedAt);
  // Bytes 10xxxxxx continue a character.
  while (!completion.empty() && (static_cast<unsigned char>(completion.front()) & 0xC0) == 0x80)
    completion.remove_prefix(1);
  return completion;
}

std::optional<std::string> extract(std::string_view completion, AnswerPlace place) {
  const std::string_view text = looked_at(completion);
  switch (place) {
    case AnswerPlace::kWhole:
      return std::string(text);
    case AnswerPlace::kBoxed:
      return last_boxed(text);
    case AnswerPlace::kHash:
      return after_hash(text);
    case AnswerPlace::kTag:
      return in_tag(text);
    case AnswerPlace::kLastLine:
      return last_line(text);
    case AnswerPlace::kAuto:
      break;
  }
  for (const AnswerPlace next : {AnswerPlace::kBoxed, AnswerPlace::kTag, AnswerPlace::kHash}) {
    if (auto found = extract(text, next)) return found;
  }
  return {};
}

std::optional<std::string_view> braced(std::string_view text, std::size_t open) {
  std::size_t depth = 0;
  for (std::size_t at = open; at < text.size(); ++at) {
    if (text[at] == '\\') {
      ++at;
    } else if (text[at] == '{') {
      ++depth;
    } else if (text[at] == '}' && --depth == 0) {
      return text.substr(open + 1, at - open - 1);
    }
  }
  return {};
}

std::string valid_utf8(std::string_view text) {
  return is_ascii(text) ? std::string(text) : to_utf8(to_utf16(text));
}

std::string canonical(std::string_view text, bool ignore_case) {
  text = text::trim(text);
  if (is_ascii(text)) {
    std::string result(text);
    if (ignore_case) {
      for (char& c : result) {
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
      }
    }
    return result;
  }
  std::u16string wide = to_utf16(text);
  if (ignore_case) {
    wide = filled(wide.size() + 16, [&](UChar* to, std::int32_t room, UErrorCode* status) {
      return u_strFoldCase(to, room, wide.data(), static_cast<std::int32_t>(wide.size()),
                           U_FOLD_CASE_DEFAULT, status);
    });
  }
  UErrorCode status = U_ZERO_ERROR;
  const UNormalizer2* form = unorm2_getNFCInstance(&status);
  if (U_FAILURE(status)) throw_error<InternalError>("ICU: {}", u_errorName(status));
  wide = filled(wide.size() * 2 + 16, [&](UChar* to, std::int32_t room, UErrorCode* error) {
    return unorm2_normalize(form, wide.data(), static_cast<std::int32_t>(wide.size()), to, room,
                            error);
  });
  return to_utf8(wide);
}

}  // namespace heddle::reward
