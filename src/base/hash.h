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
  std::string hex() const;

 private:
  void* state_;
};

}  // namespace heddle::hash
