#define PCRE2_CODE_UNIT_WIDTH 8

#include "ckpt/pattern.h"

#include <pcre2.h>

#include "base/errors.h"
#include "base/quote.h"

namespace heddle::ckpt {

Pattern::Pattern(const std::string& expression, const std::string& where) : where_(where) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                    PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
  if (!code) {
    PCRE2_UCHAR message[256];
    pcre2_get_error_message(error, message, sizeof message);
    throw_error<ModelError>("{}: not a regular expression at its character {}: {} ('{}')", where_,
                            offset, reinterpret_cast<const char*>(message),
                            text::shown(expression));
  }
  code_ =
      std::shared_ptr<void>(code, [](void* p) { pcre2_code_free(static_cast<pcre2_code*>(p)); });
}

std::optional<Pattern::Match> Pattern::match(std::string_view text, std::uint32_t options) const {
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data(
      pcre2_match_data_create_from_pattern(code, nullptr), pcre2_match_data_free);
  // Names are short: an expression that needs more goes back over the same places without end.
  constexpr std::uint32_t kMostSteps = 100'000;
  const std::unique_ptr<pcre2_match_context, void (*)(pcre2_match_context*)> context(
      pcre2_match_context_create(nullptr), pcre2_match_context_free);
  pcre2_set_match_limit(context.get(), kMostSteps);
  const int count = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0,
                                PCRE2_ANCHORED | options, data.get(), context.get());
  if (count == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (count < 0) {
    PCRE2_UCHAR message[256];
    pcre2_get_error_message(count, message, sizeof message);
    throw_error<ModelError>("{}: the expression cannot be matched against '{}': {}", where_,
                            text::shown(text), reinterpret_cast<const char*>(message));
  }
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(data.get());
  Match match{ends[1], ""};
  if (count > 1 && ends[2] != PCRE2_UNSET) match.group = text.substr(ends[2], ends[3] - ends[2]);
  return match;
}

bool Pattern::matches_all(std::string_view text) const {
  return match(text, PCRE2_ENDANCHORED).has_value();
}

bool Pattern::matches_prefix(std::string_view text) const { return match(text, 0).has_value(); }

std::optional<std::string> Pattern::first_group(std::string_view text) const {
  auto found = match(text, 0);
  if (!found) return std::nullopt;
  return std::move(found->group);
}

}  // namespace heddle::ckpt
