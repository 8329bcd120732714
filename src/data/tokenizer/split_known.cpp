#include <array>

#include "data/tokenizer/split.h"
#include "data/tokenizer/unicode_classes.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data {
namespace {

constexpr std::string_view kContraction = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|";
constexpr std::string_view kSpaces = "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
constexpr std::string_view kWordsQwen2 = "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|";
constexpr std::string_view kOtherQwen2 = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*";
constexpr std::string_view kWordsQwen35 = "[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|";
constexpr std::string_view kOtherQwen35 = "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*";
constexpr char32_t kLongS = 0x17F;  // folds to s, so that "'ſ" is a contraction too

/// The alternatives of the pattern in their order; each `if` below is one, with its greedy runs and
/// its backtracking.
class KnownSplit final : public Split {
 public:
  KnownSplit(bool marks_in_words, int most_digits)
      : most_digits_(most_digits), classes_(unicode_classes().data()) {
    word_ = marks_in_words ? kLetter | kMark : kLetter;
    // Whatever is neither space, nor number, nor part of a word.
    not_other_ = static_cast<std::uint8_t>(kSpace | kNumber | word_);
  }

  std::size_t next(std::string_view text, std::size_t at, SplitBudget&) const override {
    const Char first = read(text, at);
    if (first.code == '\'') {
      if (const std::size_t end = contraction(text, at + 1); end != 0) return end;
    }
    if (!(first.kind & (kLetter | kNumber)) && first.code != '\r' && first.code != '\n') {
      // The optional character before a word: taken if a word follows.
      const std::size_t after = at + first.bytes;
      if (after < text.size() && (read(text, after).kind & word_)) return run(text, after, word_);
    }
    if (first.kind & word_) return run(text, at + first.bytes, word_);
    if (first.kind & kNumber) {
      std::size_t end = at + first.bytes;
      for (int digits = 1; digits < most_digits_ && end < text.size(); ++digits) {
        const Char c = read(text, end);
        if (!(c.kind & kNumber)) break;
        end += c.bytes;
      }
      return end;
    }
    if (!(first.kind & kSpace)) return punctuation(text, at + first.bytes);
    if (first.code == ' ' && at + 1 < text.size()) {
      const Char c = read(text, at + 1);
      if (!(c.kind & not_other_)) return punctuation(text, at + 1 + c.bytes);
    }
    return spaces(text, at);
  }

 private:
  struct Char {
    char32_t code;
    std::uint32_t bytes;
    std::uint8_t kind;
  };

  Char read(std::string_view text, std::size_t at) const {
    const auto c = static_cast<unsigned char>(text[at]);
    if (c < 0x80) return {c, 1, classes_[c]};
    const utf8::Decoded decoded = utf8::decode(text, at);
    return {decoded.code_point, decoded.bytes, classes_[decoded.code_point]};
  }

  /// End of the contraction whose apostrophe stands before `at`, or 0.
  std::size_t contraction(std::string_view text, std::size_t at) const {
    if (at >= text.size()) return 0;
    const auto lower = [&](std::size_t i) { return i < text.size() ? text[i] | 0x20 : 0; };
    switch (lower(at)) {
      case 's':
      case 't':
      case 'm':
      case 'd':
        return at + 1;
      case 'r':
      case 'v':
        return lower(at + 1) == 'e' ? at + 2 : 0;
      case 'l':
        return lower(at + 1) == 'l' ? at + 2 : 0;
      default:
        return read(text, at).code == kLongS ? at + 2 : 0;
    }
  }

  std::size_t run(std::string_view text, std::size_t at, std::uint8_t kinds) const {
    while (at < text.size()) {
      const Char c = read(text, at);
      if (!(c.kind & kinds)) break;
      at += c.bytes;
    }
    return at;
  }

  /// The rest of a run of other characters, and the line ends after it.
  std::size_t punctuation(std::string_view text, std::size_t at) const {
    while (at < text.size()) {
      const Char c = read(text, at);
      if (c.kind & not_other_) break;
      at += c.bytes;
    }
    while (at < text.size() && (text[at] == '\r' || text[at] == '\n')) ++at;
    return at;
  }

  std::size_t spaces(std::string_view text, std::size_t at) const {
    std::size_t end = at, after_line_end = 0, last = at;
    while (end < text.size()) {
      const Char c = read(text, end);
      if (!(c.kind & kSpace)) break;
      last = end;
      end += c.bytes;
      if (c.code == '\r' || c.code == '\n') after_line_end = end;
    }
    if (after_line_end != 0) return after_line_end;
    // The last space before a word belongs to the word, unless it is the only one.
    return end == text.size() || last == at ? end : last;
  }

  int most_digits_;
  std::uint8_t word_;
  std::uint8_t not_other_;
  const std::uint8_t* classes_;
};

}  // namespace

std::unique_ptr<Split> make_known_split(std::string_view pattern) {
  for (const bool marks : {false, true}) {
    for (const int digits : {1, 3}) {
      std::string known(kContraction);
      known += marks ? kWordsQwen35 : kWordsQwen2;
      known += digits == 1 ? "\\p{N}" : "\\p{N}{1,3}";
      known += marks ? kOtherQwen35 : kOtherQwen2;
      known += kSpaces;
      if (pattern == known) return std::make_unique<KnownSplit>(marks, digits);
    }
  }
  return nullptr;
}

}  // namespace heddle::data
