#include "adapters/dropout.h"

#include "base/hash.h"

namespace heddle::adapters {

std::uint64_t dropout_key(std::uint64_t seed, const std::string& module) {
  return hash::of(module + "/dropout", seed);
}

}  // namespace heddle::adapters
