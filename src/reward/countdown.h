#pragma once

#include <memory>

#include "reward/environment.h"
#include "reward/parameters.h"

namespace heddle::reward {

/// Numbers and a target that some expression over all of them, each once, has for its value. A
/// right answer is any such expression.
std::unique_ptr<Task> make_countdown(Parameters& parameters);

}  // namespace heddle::reward
