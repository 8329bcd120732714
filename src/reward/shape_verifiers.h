#pragma once

#include <memory>

#include "reward/parameters.h"
#include "reward/verifiers.h"

/// Verifiers that look at a completion's form and need no truth. Parameters: docs/rewards.md.
namespace heddle::reward {

std::unique_ptr<Verifier> make_format(Parameters& parameters);
std::unique_ptr<Verifier> make_length(Parameters& parameters);
std::unique_ptr<Verifier> make_repetition(Parameters& parameters);
std::unique_ptr<Verifier> make_overlong(Parameters& parameters);

}  // namespace heddle::reward
