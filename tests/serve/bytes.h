#pragma once

#include <zstd.h>

#include <string>

namespace heddle::serve::testing {

/// Bytes after their count, as protobuf has them.
inline std::string sized(const std::string& bytes) {
  std::string out;
  std::size_t size = bytes.size();
  for (; size >= 0x80; size >>= 7) out += static_cast<char>(0x80 | (size & 0x7F));
  return out + static_cast<char>(size) + bytes;
}

inline std::string zstd_of(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

}  // namespace heddle::serve::testing
