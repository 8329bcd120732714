#pragma once

#include <algorithm>
#include <string_view>

#include "ops/registry.h"

namespace heddle::ops {

/// Whether the operator was requested and runs this kernel.
inline bool chose(const KernelTable& kernels, std::string_view op, std::string_view kernel) {
  return std::ranges::any_of(kernels.choices(), [&](const KernelTable::Choice& choice) {
    return choice.op == op && choice.kernel == kernel;
  });
}

/// Whether the operator was requested and runs its reference.
inline bool runs_reference(const KernelTable& kernels, std::string_view op) {
  return std::ranges::any_of(kernels.choices(), [&](const KernelTable::Choice& choice) {
    return choice.op == op && choice.is_reference;
  });
}

}  // namespace heddle::ops
