#pragma once

#include <string>

#include "ops/registry.h"

namespace heddle::ops {

/// The kernels of a registry as a table in Markdown, operator by operator, in the order in which
/// they are tried: where each runs, its dtypes, and by what rule it is taken or leaves calls to
/// another. docs/kernels.md shows it.
std::string kernel_document(const Registry& registry);

}  // namespace heddle::ops
