#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace heddle::data {

/// Cuts a text into the words that byte-level BPE merges inside of. The whole text is covered: what
/// a pattern does not match is a word too ("isolated" in tokenizer.json).
class Split {
 public:
  virtual ~Split() = default;
  /// End of the word that begins at `at` < text.size(); > at. `text` is valid UTF-8 and may not be
  /// empty.
  virtual std::size_t next(std::string_view text, std::size_t at) const = 0;
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
