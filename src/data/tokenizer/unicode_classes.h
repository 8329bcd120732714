#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace heddle::data {

/// Classes of a code point in the split patterns: at most one of the first four bits.
enum CodeClass : std::uint8_t {
  kLetter = 1,
  kNumber = 2,
  kMark = 4,
  kSpace = 8,
  /// A text without such a code point is its own NFC form.
  kNfcRelevant = 16,
};

/// One byte of CodeClass bits for each code point, as the `tokenizers` library classifies it
/// (Unicode 16).
const std::vector<std::uint8_t>& unicode_classes();

/// True if NFC could change the valid UTF-8 `text`.
bool may_change_under_nfc(std::string_view text);

}  // namespace heddle::data
