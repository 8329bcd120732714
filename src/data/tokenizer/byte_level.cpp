#include "data/tokenizer/byte_level.h"

#include <array>

#include "data/tokenizer/utf8.h"

namespace heddle::data::byte_level {
namespace {

constexpr char32_t kFirstMoved = 0x100;
constexpr int kMoved = 68;

constexpr bool is_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr std::array<unsigned char, kMoved> moved_bytes() {
  std::array<unsigned char, kMoved> moved{};
  int count = 0;
  for (int byte = 0; byte < 256; ++byte) {
    if (!is_itself(byte)) moved[count++] = static_cast<unsigned char>(byte);
  }
  return moved;
}

constexpr std::array<unsigned char, kMoved> kMovedBytes = moved_bytes();

}  // namespace

std::string spelling(unsigned char byte) {
  std::string out;
  char32_t code = byte;
  for (int i = 0; i < kMoved; ++i) {
    if (kMovedBytes[i] == byte && !is_itself(byte)) code = kFirstMoved + i;
  }
  utf8::append(out, code);
  return out;
}

bool to_bytes(std::string_view token, std::string& bytes) {
  bytes.clear();
  if (utf8::valid_prefix(token) != token.size()) return false;
  for (std::size_t at = 0; at < token.size();) {
    const utf8::Decoded next = utf8::decode(token, at);
    at += next.bytes;
    if (next.code_point < 0x100 && is_itself(static_cast<int>(next.code_point))) {
      bytes += static_cast<char>(next.code_point);
    } else if (next.code_point >= kFirstMoved && next.code_point < kFirstMoved + kMoved) {
      bytes += static_cast<char>(kMovedBytes[next.code_point - kFirstMoved]);
    } else {
      return false;
    }
  }
  return true;
}

std::string to_bytes_or_self(std::string_view token) {
  std::string bytes;
  return to_bytes(token, bytes) ? bytes : std::string(token);
}

}  // namespace heddle::data::byte_level
