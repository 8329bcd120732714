#include "data/tokenizer/unicode_classes.h"

#include <span>

#include "data/tokenizer/utf8.h"

namespace heddle::data {
namespace {

struct CodeRange {
  char32_t first;
  char32_t last;
};
#include "data/tokenizer/unicode_classes.inc"

std::vector<std::uint8_t> build() {
  std::vector<std::uint8_t> table(0x110000, 0);
  const auto mark = [&](std::span<const CodeRange> ranges, std::uint8_t bit) {
    for (const CodeRange& range : ranges) {
      for (char32_t c = range.first; c <= range.last; ++c) table[c] |= bit;
    }
  };
  mark(kLetters, kLetter);
  mark(kNumbers, kNumber);
  mark(kMarks, kMark);
  mark(kSpaces, kSpace);
  mark(kNfcChangeable, kNfcRelevant);
  return table;
}

}  // namespace

const std::vector<std::uint8_t>& unicode_classes() {
  static const std::vector<std::uint8_t> table = build();
  return table;
}

bool may_change_under_nfc(std::string_view text) {
  const std::uint8_t* classes = unicode_classes().data();
  for (std::size_t at = 0; at < text.size();) {
    // Below U+0300, whose first byte is 0xCC, nothing changes.
    if (static_cast<unsigned char>(text[at]) < 0xCC) {
      ++at;
      continue;
    }
    const utf8::Decoded next = utf8::decode(text, at);
    if (classes[next.code_point] & kNfcRelevant) return true;
    at += next.bytes;
  }
  return false;
}

}  // namespace heddle::data
