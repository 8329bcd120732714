// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/gated_delta_net/kernels.h"

namespace heddle::ops::gated_delta_rule_cuda {

void add(Registry&) {}

}  // namespace heddle::ops::gated_delta_rule_cuda
