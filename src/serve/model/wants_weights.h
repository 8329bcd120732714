#pragma once

#include <functional>
#include <memory>
#include <string>

#include "serve/model/generation.h"

namespace heddle::serve {

/// A request that waits for weights, which may come from the disk. One of the two is called, once.
struct WantsWeights {
  std::function<void(std::shared_ptr<const SamplerWeights>)> ready;
  std::function<void(int status, const std::string& message)> failed;
};

}  // namespace heddle::serve
