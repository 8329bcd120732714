#include "base/hash.h"

#include <xxhash.h>

#include <fmt/format.h>

namespace heddle::hash {

std::uint64_t of(std::string_view bytes, std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

Hasher::Hasher() : state_(XXH3_createState()) {
  XXH3_128bits_reset(static_cast<XXH3_state_t*>(state_));
}

Hasher::~Hasher() { XXH3_freeState(static_cast<XXH3_state_t*>(state_)); }

Hasher& Hasher::add(std::string_view bytes) {
  // The length separates the pieces: ("ab", "c") and ("a", "bc") are different keys.
  const std::uint64_t size = bytes.size();
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state_), &size, sizeof size);
  return append(bytes);
}

Hasher& Hasher::append(std::string_view bytes) {
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state_), bytes.data(), bytes.size());
  return *this;
}

std::string Hasher::hex() const {
  const XXH128_hash_t digest = XXH3_128bits_digest(static_cast<XXH3_state_t*>(state_));
  return fmt::format("{:016x}{:016x}", digest.high64, digest.low64);
}

}  // namespace heddle::hash
