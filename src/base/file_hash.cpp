#include "base/file_hash.h"

#include <algorithm>

#include "base/files.h"
#include "base/hash.h"

namespace heddle::hash {

std::string of_file(const std::filesystem::path& path) {
  const files::MappedFile file(path);
  const auto bytes = file.bytes();
  Hasher hasher;
  constexpr std::size_t kPiece = std::size_t{16} << 20;
  for (std::size_t at = 0; at < bytes.size(); at += kPiece) {
    const std::size_t count = std::min(kPiece, bytes.size() - at);
    hasher.add({reinterpret_cast<const char*>(bytes.data()) + at, count});
    file.drop(at, count);
  }
  return hasher.hex();
}

}  // namespace heddle::hash
