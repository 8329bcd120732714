#include "data/tokenizer/added_tokens.h"

#include <unicode/uchar.h>

#include <algorithm>

#include "data/tokenizer/unicode_classes.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data {
namespace {

bool is_space(char32_t c) { return unicode_classes()[c] & kSpace; }

/// \w of Unicode's regular-expression guidelines (UTS 18, annex C).
bool is_word(char32_t c) {
  const auto code = static_cast<UChar32>(c);
  const int type = u_charType(code);
  return u_hasBinaryProperty(code, UCHAR_ALPHABETIC) || (unicode_classes()[c] & kMark) ||
         type == U_DECIMAL_DIGIT_NUMBER || type == U_CONNECTOR_PUNCTUATION ||
         u_hasBinaryProperty(code, UCHAR_JOIN_CONTROL);
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  roots_.fill(-1);
  for (std::size_t index = 0; index < tokens_.size(); ++index) {
    const std::string& content = tokens_[index].content;
    if (content.empty()) continue;
    std::int32_t node = -1;
    for (const char c : content) {
      const auto byte = static_cast<unsigned char>(c);
      std::int32_t next = -1;
      if (node < 0) {
        next = roots_[byte];
      } else {
        for (const auto& [key, child] : nodes_[node].children) {
          if (key == byte) next = child;
        }
      }
      if (next < 0) {
        next = static_cast<std::int32_t>(nodes_.size());
        nodes_.emplace_back();
        if (node < 0) {
          roots_[byte] = next;
        } else {
          nodes_[node].children.emplace_back(byte, next);
        }
      }
      node = next;
    }
    nodes_[node].token = static_cast<std::int32_t>(index);
  }
}

std::int32_t AddedTokenFinder::longest_at(std::string_view text, std::size_t at) const {
  std::int32_t node = roots_[static_cast<unsigned char>(text[at])];
  std::int32_t found = -1;
  while (node >= 0) {
    if (nodes_[node].token >= 0) found = nodes_[node].token;
    if (++at == text.size()) break;
    const auto byte = static_cast<unsigned char>(text[at]);
    std::int32_t next = -1;
    for (const auto& [key, child] : nodes_[node].children) {
      if (key == byte) {
        next = child;
        break;
      }
    }
    node = next;
  }
  return found;
}

void AddedTokenFinder::split(std::string_view text, bool skip_special,
                             std::vector<Piece>& pieces) const {
  std::size_t done = 0;  // everything before is in `pieces`
  // The white space that a token swallowed last: others may be found inside it, and do not look for
  // its end once more.
  std::size_t space_begin = 0, space_end = 0;
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  for (std::size_t at = tokens_.empty() ? text.size() : 0; at < text.size();) {
    if (roots_[bytes[at]] < 0) {
      ++at;
      continue;
    }
    const std::int32_t found = longest_at(text, at);
    if (found < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[found];
    std::size_t begin = at, end = at + token.content.size();
    at = end;  // a token that is found but refused below still hides others inside it, as in the
               // library
    if (skip_special && token.special) continue;
    if (token.single_word && ((begin > 0 && is_word(utf8::decode_before(text, begin).code_point)) ||
                              (end < text.size() && is_word(utf8::decode(text, end).code_point)))) {
      continue;
    }
    if (token.lstrip) {
      while (begin > done) {
        const utf8::Decoded before = utf8::decode_before(text, begin);
        if (!is_space(before.code_point)) break;
        begin -= before.bytes;
      }
      begin = std::max(begin, done);
    }
    if (token.rstrip) {
      if (end < space_begin || end > space_end) space_begin = space_end = end;
      while (space_end < text.size()) {
        const utf8::Decoded after = utf8::decode(text, space_end);
        if (!is_space(after.code_point)) break;
        space_end += after.bytes;
      }
      end = space_end;
    }
    if (done < begin) pieces.push_back({-1, done, begin});
    pieces.push_back({token.id, begin, end});
    done = end;
  }
  if (done < text.size()) pieces.push_back({-1, done, text.size()});
}

}  // namespace heddle::data
