#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace heddle::hash {

/// xxHash3, 64 bits.
std::uint64_t of(std::string_view bytes, std::uint64_t seed = 0);

/// xxHash3 of 128 bits over several pieces, as 32 hexadecimal digits: a key for files on disk.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;
  Hasher& add(std::string_view bytes);
  /// Adds bytes without separating them from what was added before: hex() after nothing but
  /// append() is what `xxh128sum` prints for a file of these bytes, whatever the pieces.
  Hasher& append(std::string_view bytes);
  std::string hex() const;

 private:
  void* state_;
};

}  // namespace heddle::hash
