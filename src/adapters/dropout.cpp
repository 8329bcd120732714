#include "adapters/dropout.h"

#include "base/hash.h"
#include "base/splitmix.h"

namespace heddle::adapters {

std::uint64_t dropout_key(std::uint64_t seed, const std::string& module, std::uint64_t step) {
  return hash::of(module + "/dropout", seed) + step * splitmix::kSequence;
}

}  // namespace heddle::adapters
