#pragma once

#include <memory>

#include "reward/parameters.h"
#include "reward/verifiers.h"

/// Verifiers that compare a completion's answer with the truth. Each takes `from`, the place of the
/// answer (extract.h). Parameters: docs/rewards.md.
namespace heddle::reward {

std::unique_ptr<Verifier> make_exact(Parameters& parameters);
std::unique_ptr<Verifier> make_contains(Parameters& parameters);
std::unique_ptr<Verifier> make_numeric(Parameters& parameters);
std::unique_ptr<Verifier> make_math(Parameters& parameters);
std::unique_ptr<Verifier> make_choice(Parameters& parameters);
std::unique_ptr<Verifier> make_regex(Parameters& parameters);
std::unique_ptr<Verifier> make_json(Parameters& parameters);

}  // namespace heddle::reward
