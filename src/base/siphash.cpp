#include "base/siphash.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include <bit>
#include <cstring>

#include "base/errors.h"

namespace heddle::hash {
namespace {

std::uint64_t load(const std::uint8_t* bytes) {
  std::uint64_t word = 0;
  for (int i = 7; i >= 0; --i) word = word << 8 | bytes[i];
  return word;
}

struct State {
  std::uint64_t v0, v1, v2, v3;

  void rounds(int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1, v1 = std::rotl(v1, 13) ^ v0, v0 = std::rotl(v0, 32);
      v2 += v3, v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3, v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1, v1 = std::rotl(v1, 17) ^ v2, v2 = std::rotl(v2, 32);
    }
  }
  void add(std::uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
  std::uint64_t sum() const { return v0 ^ v1 ^ v2 ^ v3; }
};

}  // namespace

Key128 siphash(const Key128& key, std::string_view bytes) {
  const std::uint64_t k0 = load(key.data()), k1 = load(key.data() + 8);
  State state = {k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d ^ 0xee, k0 ^ 0x6c7967656e657261,
                 k1 ^ 0x7465646279746573};
  const auto* at = reinterpret_cast<const std::uint8_t*>(bytes.data());
  std::size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) state.add(load(at));
  std::uint8_t last[8] = {};
  if (left > 0) std::memcpy(last, at, left);
  last[7] = static_cast<std::uint8_t>(bytes.size());
  state.add(load(last));
  Key128 out;
  const auto store = [&](std::size_t offset, std::uint64_t word) {
    for (std::size_t i = 0; i < 8; ++i)
      out[offset + i] = static_cast<std::uint8_t>(word >> (8 * i));
  };
  state.v2 ^= 0xee;
  state.rounds(4);
  store(0, state.sum());
  state.v1 ^= 0xdd;
  state.rounds(4);
  store(8, state.sum());
  return out;
}

Key128 key_of(std::string_view secret) { return siphash({}, secret); }

Key128 random_key() {
  Key128 key;
  if (getrandom(key.data(), key.size(), 0) != static_cast<ssize_t>(key.size()))
    throw_error<FileError>("cannot read random bytes: {}", strerror(errno));
  return key;
}

bool equal(const Key128& a, const Key128& b) {
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace heddle::hash
