#pragma once

#include <string>
#include <string_view>

#include "reward/number.h"

namespace heddle::reward {

/// An answer in one spelling: without spaces of LaTeX, \left and \right, \text around words, dollar
/// signs, degrees and a final point; \dfrac is \frac, Unicode signs are commands, "x = 5" is "5".
std::string normalised_math(std::string_view answer);

/// Whether two answers are the same: as normalised strings; as lists, sets (any order), tuples and
/// intervals (in order) of such; as numbers, with units that one side may leave out; as expressions
/// by value (expression.h). No symbolic algebra: x + x = 2x is found, an identity that holds only
/// on part of the numbers is not.
bool same_math(std::string_view a, std::string_view b, const Tolerance& tolerance = {});

}  // namespace heddle::reward
