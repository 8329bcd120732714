#pragma once

#include <string>
#include <string_view>

#include "base/siphash.h"

namespace heddle::comm {

/// How a store and a client show each other, before anything else is said, that they have the job's
/// secret: each names a number that was never used, and the other answers with a keyed hash of both
/// numbers. The store speaks first: kStoreMagic and its number; the client: its number and its
/// hash; the store: its own hash, or zeros for a client that does not belong to the job.
inline constexpr std::string_view kStoreMagic = "HEDSTOR1";
inline constexpr std::size_t kStoreHelloBytes = 8 + 16, kClientHelloBytes = 32,
                             kStoreReplyBytes = 16;

inline std::string_view as_text(const hash::Key128& key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}
inline hash::Key128 as_key(std::string_view text) {
  hash::Key128 key{};
  text.copy(reinterpret_cast<char*>(key.data()), key.size());
  return key;
}

/// The answer of `side` ("client" or "store") to the two numbers.
inline hash::Key128 proof(const hash::Key128& secret, std::string_view side,
                          std::string_view store_number, std::string_view client_number) {
  return hash::siphash(secret, std::string(side).append(store_number).append(client_number));
}

}  // namespace heddle::comm
