#pragma once

#include <memory>

#include "reward/environment.h"
#include "reward/parameters.h"

namespace heddle::reward {

/// A number to be guessed in several turns, each answered by "higher" or "lower".
std::unique_ptr<Task> make_guess_number(Parameters& parameters);

}  // namespace heddle::reward
