#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace heddle::data {

/// Work that the patterns of a tokenizer may still do on one text, in steps of the matcher; so that
/// a hostile pattern costs time in proportion to the text and not to its square.
class SplitBudget {
 public:
  SplitBudget() = default;
  /// Enough for every pattern whose matches do not reach much further than the words they cut.
  explicit SplitBudget(std::size_t bytes) : left_(1'000'000 + std::uint64_t{64} * bytes) {}
  /// False once more was taken than there is.
  bool take(std::uint64_t steps) {
    const bool enough = steps <= left_;
    left_ = enough ? left_ - steps : 0;
    return enough;
  }

 private:
  std::uint64_t left_ = 0;
};

/// Cuts a text into the words that byte-level BPE merges inside of. The whole text is covered: what
/// a pattern does not match is a word too ("isolated" in tokenizer.json).
class Split {
 public:
  virtual ~Split() = default;
  /// End of the word that begins at `at` < text.size(); > at. `text` is valid UTF-8 and may not be
  /// empty. Throws DataError where a pattern takes more steps than `budget` has.
  virtual std::size_t next(std::string_view text, std::size_t at, SplitBudget& budget) const = 0;
};

/// The pattern of Qwen2 to Qwen3-Next,
/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|
/// \s*[\r\n]+|\s+(?!\S)|\s+`, and that of Qwen3.5, in which marks belong to words, as hand-written
/// code; also with \p{N}{1,3}. Null for any other pattern. Linear in the text.
std::unique_ptr<Split> make_known_split(std::string_view pattern);

/// Any pattern, by PCRE2. Throws DataError with `where` and the reason if the pattern does not
/// compile. Unicode classes are those of the installed PCRE2, which may be older than the ones the
/// pattern was meant for.
std::unique_ptr<Split> make_regex_split(const std::string& pattern, const std::string& where);

}  // namespace heddle::data
