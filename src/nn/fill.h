#pragma once

#include <cstdint>
#include <functional>

#include "nn/parameter.h"

namespace heddle::nn {

/// Fills owned(): element i of the whole parameter, in row-major order, is value(i), however the
/// ranks divide it. Values of elements that other ranks own are never asked for, so a rank needs
/// time and memory (8 bytes an element) for its own alone. `value` is called from several threads.
void fill_owned(Parameter& parameter, const std::function<double(std::uint64_t)>& value);

}  // namespace heddle::nn
