#pragma once

#include <unistd.h>

#include <cstdint>

#include "base/errors.h"
#include "comm/listener.h"

namespace heddle::testing {

/// A port for a process that is yet to listen on it, as a scheduler would give. It is below those
/// that the system chooses from, so that no other process gets it meanwhile.
inline std::uint16_t free_port() {
  constexpr std::uint32_t kFirst = 10'000, kCount = 20'000, kEach = 50;
  static std::uint32_t given = 0;
  for (std::uint32_t tries = 0; tries < kCount; ++tries) {
    // Test programs that run side by side begin apart from each other.
    const auto port = static_cast<std::uint16_t>(
        kFirst + (static_cast<std::uint32_t>(getpid()) * kEach + given++) % kCount);
    try {
      return comm::Listener(port).port();
    } catch (const CommError&) {
      continue;  // somebody else listens there
    }
  }
  throw_error<InternalError>("no port is free");
}

}  // namespace heddle::testing
