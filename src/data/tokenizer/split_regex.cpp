#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>

#include "base/errors.h"
#include "data/tokenizer/split.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data {
namespace {

std::string reason(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

/// The patterns are written for an engine whose \s is Unicode's White_Space; PCRE2 adds U+180E to
/// it.
std::string translate_space(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c != '\\' || i + 1 == pattern.size()) {
      if (c == '[') in_class = true;
      if (c == ']') in_class = false;
      out += c;
      continue;
    }
    const char escaped = pattern[++i];
    if (escaped == 's') {
      out += in_class ? "\\t-\\r\\x{85}\\p{Z}" : "[\\t-\\r\\x{85}\\p{Z}]";
    } else if (escaped == 'S' && !in_class) {
      out += "[^\\t-\\r\\x{85}\\p{Z}]";
    } else {
      out += c;
      out += escaped;
    }
  }
  return out;
}

class RegexSplit final : public Split {
 public:
  RegexSplit(const std::string& pattern, const std::string& where) : where_(where) {
    int code = 0;
    PCRE2_SIZE offset = 0;
    const std::string translated = translate_space(pattern);
    code_ = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                          PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &offset, nullptr);
    if (code_ == nullptr) {
      throw_error<DataError>("{}: the pattern '{}' does not compile: {} at offset {}", where,
                             pattern, reason(code), offset);
    }
    // Without JIT (an architecture that lacks it) the interpreter gives the same matches.
    pcre2_jit_compile(code_, PCRE2_JIT_COMPLETE);
    context_ = pcre2_match_context_create(nullptr);
    // A bound on backtracking, so that a hostile pattern ends with an error.
    pcre2_set_match_limit(context_, 10'000'000);
  }
  ~RegexSplit() override {
    pcre2_match_context_free(context_);
    pcre2_code_free(code_);
  }
  RegexSplit(const RegexSplit&) = delete;
  RegexSplit& operator=(const RegexSplit&) = delete;

  std::size_t next(std::string_view text, std::size_t at) const override {
    const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
        pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
    for (std::size_t from = at; from < text.size();) {
      int count = match_from(text, from, PCRE2_NO_UTF_CHECK, match.get());
      if (count == PCRE2_ERROR_JIT_STACKLIMIT) {  // the interpreter keeps its state on the heap
        count = match_from(text, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match.get());
      }
      if (count == PCRE2_ERROR_NOMATCH) break;
      if (count < 0)
        throw_error<DataError>("{}: the split pattern cannot be matched: {}", where_,
                               reason(count));
      const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match.get());
      if (range[0] > at) return range[0];
      if (range[1] > at) return range[1];
      from =
          at + utf8::decode(text, at).bytes;  // an empty match here: look behind the next character
    }
    return text.size();
  }

 private:
  int match_from(std::string_view text, std::size_t from, std::uint32_t flags,
                 pcre2_match_data* match) const {
    return pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from, flags,
                       match, context_);
  }

  std::string where_;
  pcre2_code* code_ = nullptr;
  pcre2_match_context* context_ = nullptr;
};

}  // namespace

std::unique_ptr<Split> make_regex_split(const std::string& pattern, const std::string& where) {
  return std::make_unique<RegexSplit>(pattern, where);
}

}  // namespace heddle::data
