#include "reward/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/errors.h"
#include "base/quote.h"
#include "reward/extract.h"

namespace heddle::reward {
namespace {

/// Steps of the matcher, 10 to 30 ms of them. Items of the pattern are counted by a callout before
/// each, and long runs inside one item by the distance to the last.
constexpr std::uint64_t kMostWork = 400'000;
constexpr std::uint64_t kBytesPerStep = 64;
constexpr std::uint32_t kHeapKib = 8 << 10, kDepth = 10'000;

struct Work {
  std::uint64_t done = 0;
  PCRE2_SIZE at = 0;
};

int count_work(pcre2_callout_block* block, void* data) {
  auto& work = *static_cast<Work*>(data);
  const PCRE2_SIZE at = block->current_position;
  work.done += 1 + (std::max(at, work.at) - std::min(at, work.at)) / kBytesPerStep;
  work.at = at;
  return work.done > kMostWork ? PCRE2_ERROR_CALLOUT : 0;
}

}  // namespace

struct Pattern::Code {
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;
  ~Code() {
    pcre2_match_context_free(context);
    pcre2_code_free(code);
  }
};

Pattern::Pattern(const std::string& expression, Match match, bool ignore_case,
                 const std::string& where)
    : code_(std::make_unique<Code>()) {
  // Without a search for where a match may begin, which is work that no callout sees.
  std::uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_AUTO_CALLOUT | PCRE2_NEVER_BACKSLASH_C |
                          PCRE2_NO_START_OPTIMIZE;
  if (match == Match::kFull) options |= PCRE2_ANCHORED | PCRE2_ENDANCHORED;
  if (ignore_case) options |= PCRE2_CASELESS;
  int error = 0;
  PCRE2_SIZE at = 0;
  code_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                              options, &error, &at, nullptr);
  if (code_->code == nullptr) {
    std::array<PCRE2_UCHAR, 256> reason{};
    pcre2_get_error_message(error, reason.data(), reason.size());
    throw_error<ConfigError>("{}: the pattern '{}' is no regular expression, at character {}: {}",
                             where, text::shown(expression), at,
                             reinterpret_cast<const char*>(reason.data()));
  }
  code_->context = pcre2_match_context_create(nullptr);
  pcre2_set_heap_limit(code_->context, kHeapKib);
  pcre2_set_depth_limit(code_->context, kDepth);
  pcre2_set_match_limit(code_->context, kMostWork);
}

Pattern::~Pattern() = default;
Pattern::Pattern(Pattern&&) noexcept = default;

std::optional<Pattern::Found> Pattern::find(std::string_view bytes) const {
  const std::string text = valid_utf8(bytes);
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
      pcre2_match_data_create_from_pattern(code_->code, nullptr), pcre2_match_data_free);
  Work work;
  const std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context(
      pcre2_match_context_copy(code_->context), pcre2_match_context_free);
  pcre2_set_callout(context.get(), count_work, &work);
  const int count = pcre2_match(code_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                0, PCRE2_NO_UTF_CHECK, match.get(), context.get());
  if (count <= 0) return {};
  const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match.get());
  // \K may put the begin behind the end.
  if (range[0] > range[1]) return {};
  Found found{text.substr(range[0], range[1] - range[0]), {}};
  if (count > 1 && range[2] != PCRE2_UNSET && range[2] <= range[3])
    found.first_group = text.substr(range[2], range[3] - range[2]);
  return found;
}

}  // namespace heddle::reward
