#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>

#include "base/errors.h"
#include "base/quote.h"
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
  RegexSplit(const std::string& pattern, const std::string& where)
      : where_(where), pattern_(pattern) {
    int code = 0;
    PCRE2_SIZE offset = 0;
    const std::string translated = translate_space(pattern);
    code_ = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                          PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_USE_OFFSET_LIMIT,
                          &code, &offset, nullptr);
    if (code_ == nullptr) {
      throw_error<DataError>("{}: the pattern '{}' does not compile: {} at offset {}", where,
                             pattern, reason(code), offset);
    }
    // Without JIT (an architecture that lacks it) the interpreter gives the same matches.
    pcre2_jit_compile(code_, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);
  }
  ~RegexSplit() override { pcre2_code_free(code_); }
  RegexSplit(const RegexSplit&) = delete;
  RegexSplit& operator=(const RegexSplit&) = delete;

  std::size_t next(std::string_view text, std::size_t at, SplitBudget& budget) const override {
    Search search;
    for (std::size_t from = at; from < text.size();) {
      if (!find(text, from, search, budget)) break;
      const PCRE2_SIZE* range = pcre2_get_ovector_pointer(search.match.get());
      if (range[0] > at) return range[0];
      if (range[1] > at) return range[1];
      from = after(text, at);  // an empty match here: look after the next character
    }
    return text.size();
  }

 private:
  struct Search {
    std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match{
        pcre2_match_data_create(1, nullptr), pcre2_match_data_free};
    std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context{
        pcre2_match_context_create(nullptr), pcre2_match_context_free};
  };

  static std::size_t after(std::string_view text, std::size_t at) {
    return at + utf8::decode(text, at).bytes;
  }

  /// The first match that begins at or after `from`. PCRE2 limits the steps of each beginning by
  /// itself and not how far they read, so that a search may still take the square of the text: the
  /// search goes in windows of beginnings that take few steps and do not read far. A beginning that
  /// needs more is tried alone, further and further, and charged.
  bool find(std::string_view text, std::size_t from, Search& search, SplitBudget& budget) const {
    while (from < text.size()) {
      std::size_t end = from + kWindow;
      int count = match_within(text, from, {.window = kWindow}, search);
      if (is_cut(count)) {
        end = from + 1;
        count = match_alone(text, from, search, budget);
      }
      if (count >= 0) return true;
      if (count != PCRE2_ERROR_NOMATCH)
        throw_error<DataError>("{}: the split pattern cannot be matched: {}", where_,
                               reason(count));
      from = std::min(utf8::boundary(text, end), text.size());
    }
    return false;
  }

  static constexpr std::size_t kWindow = 64;
  /// Bound of the interpreter's state; PCRE2 allows 20 GB.
  static constexpr std::uint32_t kMostHeap_KiB = 128 << 10;
  /// How a match is tried.
  struct Trial {
    std::size_t window = 1;     ///< Bytes in which it may begin.
    std::size_t reach = 512;    ///< Bytes after them that it may read.
    std::uint32_t steps = 256;  ///< For each beginning.
  };

  /// The trial found nothing within its bounds, and might without them.
  static bool is_cut(int count) {
    return count == PCRE2_ERROR_MATCHLIMIT || count == PCRE2_ERROR_PARTIAL;
  }

  /// A match that begins at `from`.
  int match_alone(std::string_view text, std::size_t from, Search& search,
                  SplitBudget& budget) const {
    constexpr std::uint32_t kMostSteps = 1U << 28U;
    Trial trial;
    int count = match_within(text, from, trial, search);
    while (is_cut(count)) {
      if (count == PCRE2_ERROR_PARTIAL) trial.reach *= 8;
      if (count == PCRE2_ERROR_MATCHLIMIT) trial.steps *= 8;
      if (trial.steps > kMostSteps ||
          !budget.take(trial.steps + std::min(trial.reach, text.size())))
        throw_error<DataError>(
            "{}: the split pattern '{}' takes too many steps on a text of {} bytes (at byte {}): a "
            "pattern must not read far ahead again and again",
            where_, text::shown(pattern_), text.size(), from);
      count = match_within(text, from, trial, search);
    }
    return count;
  }

  /// A match that begins in the window from `from`, or PCRE2's negative code.
  int match_within(std::string_view text, std::size_t from, const Trial& trial,
                   Search& search) const {
    const std::size_t end = utf8::boundary(text, from + trial.window + trial.reach);
    const bool reads_all = end >= text.size();
    pcre2_set_offset_limit(search.context.get(), from + trial.window - 1);
    pcre2_set_match_limit(search.context.get(), trial.steps);
    pcre2_set_heap_limit(search.context.get(), kMostHeap_KiB);
    const auto match = [&](std::uint32_t flags) {
      return pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text.data()),
                         reads_all ? text.size() : end, from,
                         PCRE2_NO_UTF_CHECK | (reads_all ? 0 : PCRE2_PARTIAL_HARD) | flags,
                         search.match.get(), search.context.get());
    };
    const int count = match(0);
    // The interpreter keeps its state on the heap.
    return count == PCRE2_ERROR_JIT_STACKLIMIT ? match(PCRE2_NO_JIT) : count;
  }

  std::string where_;
  std::string pattern_;
  pcre2_code* code_ = nullptr;
};

}  // namespace

std::unique_ptr<Split> make_regex_split(const std::string& pattern, const std::string& where) {
  return std::make_unique<RegexSplit>(pattern, where);
}

}  // namespace heddle::data
